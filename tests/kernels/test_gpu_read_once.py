"""Hints to the second-level cache on a Hopper GPU: no result changes by them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from attnloom import flex_attention
from attnloom.backends.triton import launch_decode
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
HEADS = {64: (16, 16), 128: (32, 8)}  # of queries and of keys; 64 MiB of keys and as many of values


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
