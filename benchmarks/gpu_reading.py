"""What no decode can beat: a kernel that reads keys and values once, adds up their words and does
nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_WORDS = 4096  # of each tensor a program: 32 KiB together, eight programs a processor
_WARPS = 8


@triton.jit
def _read_words(
    key, value, pages, sums, heads, num_pages, streams, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """CHUNK: words of a page of one head. Programs next to each other read in `streams` places at
    once, each in order."""
    pid = tl.program_id(0)
    per_stream = tl.num_programs(0) // streams
    start = ((pid % streams) * per_stream + pid // streams).to(tl.int64) * WORDS
    PART: tl.constexpr = min(CHUNK, WORDS)
    first = start + tl.arange(0, WORDS // PART) * PART
    if PAGED:
        chunk = first // CHUNK
        unit = chunk // num_pages
        place = tl.load(pages + unit // heads * num_pages + chunk % num_pages)
        first = (place.to(tl.int64) * heads + unit % heads) * CHUNK + first % CHUNK
    first = tl.multiple_of(first, 4)  # or loads are of single words
    words = first[:, None] + tl.arange(0, PART)[None, :]
    both = tl.load(key + words) ^ tl.load(value + words)
    tl.store(sums + pid, tl.sum(tl.ravel(both).to(tl.int64)))


def reading(
    key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor | None = None, streams: int = 1
) -> Callable[[], torch.Tensor]:
    """Reads contiguous [B, Hkv, L, D], or [num_pages, Hkv, page_size, D] in the order of `pages`
    [B, columns] int32; gives sums that all of it went into."""
    assert key.is_contiguous() and value.is_contiguous() and key.shape == value.shape
    words = [x.view(-1).view(torch.int32) for x in (key, value)]
    programs = words[0].numel() // _WORDS
    assert programs * _WORDS == words[0].numel() and programs % streams == 0
    chunk = _WORDS if pages is None else key[0, 0].numel() * key.element_size() // 4
    table = words[0] if pages is None else pages
    kernel: Any = _read_words
    columns = 1 if pages is None else pages.size(1)

    def run() -> torch.Tensor:
        sums = torch.empty(programs, dtype=torch.int64, device=key.device)
        kernel[(programs,)](
            *words, table, sums, key.size(1), columns, streams, _WORDS, chunk,
            pages is not None, num_warps=_WARPS,
        )  # fmt: skip
        return sums

    return run
