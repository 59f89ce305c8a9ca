"""Hints to the second-level cache on a Hopper GPU: no result changes by them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from attnloom import PagedKV, PageTable, create_block_mask, flex_attention
from attnloom.backends.reference import paged_reference
from attnloom.backends.triton import launch_decode, launch_paged
from attnloom.backends.triton.config import value_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16 = torch.bfloat16
B, L = 8, 4096
LENGTHS = (L, L - 1, 1, 0, 77, L - 96, L // 2 + 1, 64)
HEADS = {64: (16, 16), 128: (32, 8)}  # of queries and of keys; 64 MiB of keys and as many of values


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def draw(head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads = HEADS[head_dim]
    draw = torch.Generator(device="cuda").manual_seed(head_dim)
    shapes = ((B, heads, 1, head_dim), *2 * [(B, kv_heads, L, head_dim)])
    query, key, value = (
        torch.randn(shape, generator=draw, device="cuda", dtype=BF16) for shape in shapes
    )
    return query, key, value


def run_both(module: Any, run: Any) -> torch.Tensor:
    """What a call gives with the hint, which is what it gives without, bit for bit."""
    with mock.patch.object(module, "_ready", {}):
        hinted = run()
        (ready,) = module._ready.values()
        assert value_of(ready.launch.config, "HINT")
    off = mock.patch.object(module, "hint_for", lambda *args: "")
    with off, mock.patch.object(module, "_ready", {}):
        plain = run()
        (ready,) = module._ready.values()
        assert not value_of(ready.launch.config, "HINT")
    assert torch.equal(hinted.view(torch.int16), plain.view(torch.int16))
    return hinted


def attend(*args: Any, **options: Any) -> torch.Tensor:
    out = flex_attention(*args, enable_gqa=True, kernel_options={"backend": "triton"}, **options)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("head_dim", HEADS)
def test_one_tensor(head_dim: int) -> None:
    query, key, value = draw(head_dim)
    out = run_both(launch_decode, lambda: attend(query, key, value))
    wide = (x.double() for x in (query, key, value))
    want = functional.scaled_dot_product_attention(*wide, enable_gqa=True)
    torch.testing.assert_close(out.double(), want, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("page_size", [0, 16, 32, 64, 256])
def test_caches(page_size: int, head_dim: int) -> None:
    """Pages in random order, and one tensor for page_size 0; what nobody has written is NaN."""
    query, key, value = draw(head_dim)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    for b, length in enumerate(LENGTHS):
        key[b, :, length:], value[b, :, length:] = torch.nan, torch.nan
    mask = create_block_mask(causal, None, None, L, L, "cuda")
    if page_size:
        places = torch.randperm(B * L // page_size, device="cuda")
        key, value = (in_pages(x, places, page_size) for x in (key, value))
        table = PageTable(lengths, None, places.int().view(B, -1), page_size, L)
        cache: tuple[Any, ...] = (PagedKV(key, value, table),)
    else:
        table, cache = PageTable(lengths, None, None, 0, L), (key, value)
        mask = mask.for_decode(lengths)
    out = run_both(launch_paged, lambda: attend(query, *cache, block_mask=mask))
    want = paged_reference(query, key, value, table).out
    torch.testing.assert_close(out.double(), want, atol=1e-3, rtol=1e-2)


def in_pages(x: torch.Tensor, places: torch.Tensor, page_size: int) -> torch.Tensor:
    cut = x.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(cut, memory_format=torch.contiguous_format)
    pages[places] = cut
    return pages
