"""The Triton kernel over pages against the oracle: page sizes, ragged queries, masks, splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnloom import PagedKV, PageTable, create_block_mask, flex_attention
from attnloom.backends.triton import configs, launch_paged
from tests.paged.before import SOME, Rows, check_rows, unread
from tests.paged.draw import Problem, check, window

__all__ = ["unread"]

SMALL = Problem(lengths=(40, 3, 70), D=16, Dv=16, block=32)


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 1, 9)], ids=str)
@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_page_sizes_and_ragged_queries(page_size: int, counts: tuple) -> None:
    check(replace(SMALL, page_size=page_size, counts=counts, mask="causal"), "triton")


@pytest.mark.parametrize("mask", ["window", "by_head", "by_batch", "bidirectional", "nothing"])
def test_masks(mask: str) -> None:
    """bidirectional looks past the ends of sequences; by_head has other lists in a group."""
    check(replace(SMALL, counts=(2, 1, 3), mask=mask, block=16, score="alibi"), "triton")


def test_without_a_mask() -> None:
    check(replace(SMALL, counts=(1, 1, 1)), "triton")


def test_an_empty_sequence() -> None:
    check(replace(SMALL, lengths=(0, 1, 64), counts=(0, 1, 1), mask="causal"), "triton")


def test_one_cache_for_a_batch_of_queries() -> None:
    check(replace(SMALL, page_size=0, shared=True, mask="causal"), "triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes_and_odd_head_dims(dtype: torch.dtype) -> None:
    check(replace(SMALL, dtype=dtype, D=24, Dv=40, mask="causal", page_size=32), "triton")


@pytest.mark.parametrize(("tile_n", "far"), [(64, False), (64, True), (128, False)])
def test_tiles_of_several_pages(tile_n: int, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what tiles inside one page give: pages are looked up a step ahead, in front of
    the tail, in it, and by each share of the keys. Entries past the length are not read."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 1, 16, generator=draw)
    lengths = torch.tensor([300, 5, 256], dtype=torch.int32)
    stored = torch.randn(2, 3, 1, 384, 16, generator=draw)
    for b, length in enumerate(lengths.tolist()):
        stored[:, b, :, length:] = torch.nan
    mask = create_block_mask(window, None, None, 512, 512, BLOCK_SIZE=128)
    monkeypatch.setattr(launch_paged, "_tiles", lambda _: (configs.Tile(16, tile_n, 4, 1),))
    monkeypatch.setattr(launch_paged, "_ready", {})
    if far:
        monkeypatch.setattr(launch_paged, "_FAR", 0)
    outs = []
    for page_size in (128, 16, 32):
        cut = stored.unflatten(3, (-1, page_size)).transpose(2, 3).flatten(1, 2)
        places = torch.randperm(cut.size(1), generator=draw)
        pages = torch.empty_like(cut, memory_format=torch.contiguous_format)
        pages[:, places] = cut
        numbers = places.int().view(3, -1)
        for b, length in enumerate(lengths.tolist()):
            numbers[b, -(-length // page_size) :] = 10**6
        kv = PagedKV(*pages, PageTable(lengths, None, numbers, page_size, 384))
        for block_mask in (None, mask):
            options = {"backend": "triton"}
            outs.append(flex_attention(query, kv, block_mask=block_mask, enable_gqa=True,
                                       kernel_options=options))  # fmt: skip
    gathered = [ready.launch.config.GATHER for ready in launch_paged._ready.values()]
    assert gathered == [False, False, True, True, True, True]
    assert not outs[0].isnan().any()
    for i, out in enumerate(outs):
        assert torch.equal(out, outs[i % 2])


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("problem", SOME, ids=str)
def test_rows_before_the_sequence_are_empty(problem: Rows) -> None:
    """Where nobody reads lengths, fewer tokens than queries: row i is at lengths - counts + i."""
    check_rows(problem, "triton")
