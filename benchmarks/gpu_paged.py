"""Decode over pages beside decode over one tensor, with the same kernel, mask and lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnloom import PagedKV, PageTable, create_block_mask, flex_attention
from benchmarks.gpu import alternate
from benchmarks.gpu_cases import DEVICE
from benchmarks.rows import Row

PAGE_SIZES = (16, 32, 64, 128, 256)
# (B, Hq, Hkv, KV_LEN, D)
SHAPES = ((32, 16, 16, 4096, 64), (32, 32, 8, 4096, 128))
_OPTIONS: Any = {"backend": "triton"}
_AGREEMENT = 2e-2

Shape = tuple[int, int, int, int, int]


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def paged_suite(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """One query against caches of one length; pages lie in random order."""
    for shape in SHAPES:
        batch, heads, kv_heads, length, head_dim = shape
        name = f"b{batch}-h{heads}-g{heads // kv_heads}-s{length}-d{head_dim}"
        if not keeps(name):
            continue
        runs = _runs(shape)
        outputs = {label: run() for label, run in runs.items()}
        for label, out in outputs.items():
            error = float((out - outputs["contiguous"]).abs().max())
            if not error <= _AGREEMENT:
                raise RuntimeError(f"{name}: {label} differs from contiguous by {error:.3g}")
        samples = alternate(runs)
        whole = samples.pop("contiguous")
        for label, ours in samples.items():
            yield Row(
                "paged",
                f"{label}-{name}",
                "decode",
                "ms",
                ours.median_ms,
                dtype="bf16",
                shape=[batch, heads, kv_heads, 1, length, head_dim],
                peer="contiguous",
                theirs=whole.median_ms,
                ours_p10=ours.p10_ms,
                ours_p90=ours.p90_ms,
                theirs_p10=whole.p10_ms,
                theirs_p90=whole.p90_ms,
                num_runs=ours.num_runs,
            )


def _runs(shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """Attention over the same keys and values in one tensor and in pages of each size."""
    batch, heads, kv_heads, length, head_dim = shape
    draw = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, dtype=torch.bfloat16, device=DEVICE)

    query = normal(batch, heads, 1, head_dim)
    key, value = (normal(batch, kv_heads, length, head_dim) for _ in range(2))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    mask = create_block_mask(_causal, None, None, length, length, DEVICE)
    attend = functools.partial(flex_attention, query, enable_gqa=True, kernel_options=_OPTIONS)
    whole = functools.partial(attend, key, value, block_mask=mask.for_decode(lengths))
    runs: dict[str, Callable[[], torch.Tensor]] = {"contiguous": whole}  # type: ignore[dict-item]
    for page_size in PAGE_SIZES:
        num_pages = length // page_size
        places = torch.randperm(batch * num_pages, generator=draw, device=DEVICE)
        table = PageTable(lengths, None, places.int().view(batch, num_pages), page_size, length)
        keys, values = (_in_pages(tensor, places, page_size) for tensor in (key, value))
        runs[f"page{page_size}"] = functools.partial(  # type: ignore[assignment]
            attend, PagedKV(keys, values, table), block_mask=mask
        )
    return runs


def _in_pages(tensor: torch.Tensor, places: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B, Hkv, L, D] as [num_pages, Hkv, page_size, D], page i of a row at places[i]."""
    cut = tensor.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(cut, memory_format=torch.contiguous_format)
    pages[places] = cut
    return pages
