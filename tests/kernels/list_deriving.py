"""Masks whose lists are derived by kernels and by torch's operators, and the comparison."""

from __future__ import annotations

import torch

from attnloom import create_block_mask
from attnloom.backends.gluon import lists_backward, merged_lists
from attnloom.backends.triton import list_launches, lists, transposed
from attnloom.block_mask import BlockLists

MODS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "by head": lambda b, h, q, kv: (q - kv).abs() < 100 * (h + 1),
    "by batch": lambda b, h, q, kv: q >= kv + 130 * b,
    "holes": lambda b, h, q, kv: ((q // 256) != 1) & ((kv // 128) != b + h) & (q >= kv),
    "stripes": lambda b, h, q, kv: (q // 64 + kv // 128) % 3 == 0,
    "one row": lambda b, h, q, kv: (q // 64 == 1) & (kv >= 0),
    "all": lambda b, h, q, kv: q + kv >= 0,
}


def lists_of(
    mod: str, length: int, blocks: tuple[int, int], device: torch.device | str
) -> BlockLists:
    mask = create_block_mask(MODS[mod], 2, 3, length, length + 70, device, BLOCK_SIZE=blocks)
    return mask.lists()


def check_work(blocks: BlockLists, tile_m: int) -> None:
    assert list_launches.takes_ranks(blocks, -(-blocks.q_len // tile_m))
    found, wanted = lists._derive_work(blocks, tile_m), lists.work_by_sort(blocks, tile_m)
    assert found.steps == wanted.steps
    same(found.work, wanted.work)


def check_transposed(blocks: BlockLists) -> None:
    assert list_launches.takes(blocks)
    found, wanted = transposed._transpose(blocks), transposed.transposed_by_sort(blocks)
    assert found.blocks.grid == wanted.blocks.grid
    same(found.offsets, wanted.offsets)
    same(found.blocks.row_offsets, wanted.blocks.row_offsets)
    same(found.blocks.entries, wanted.blocks.entries)


def check_swept(blocks: BlockLists) -> None:
    assert list_launches.takes(blocks)
    found, wanted = lists_backward._sweep(blocks), lists_backward.swept_by_sort(blocks)
    same(found.entries, wanted.entries)
    same(found.window, wanted.window)
    same(found.rows, wanted.rows)


def check_merged(
    blocks: BlockLists, consumers: int, rows: int | None = None, turned: bool = False
) -> None:
    """Lists of tiles; where they lie is each way's own affair. turned: of the transposed mask."""
    rows = rows or merged_lists.ROWS
    if turned:
        blocks = transposed.transposed_by_sort(blocks).blocks
    num_tiles = -(-blocks.q_len // (consumers * rows))
    assert merged_lists._takes(blocks, num_tiles, consumers)
    found = merged_lists._merge(blocks, consumers, rows)
    wanted = merged_lists.merged_by_sort(blocks, consumers, rows)
    assert found.steps == wanted.steps and found.entries.numel() == wanted.entries.numel()
    same(found.work[..., 0], wanted.work[..., 0])
    same(_counts(found.work), _counts(wanted.work))
    same(found.bounds.diff(dim=1), wanted.bounds.diff(dim=1))
    places = found.bounds.tolist(), wanted.bounds.tolist()
    for (first, last), (begin, end) in zip(*places, strict=True):
        assert found.entries[first:last].tolist() == wanted.entries[begin:end].tolist()
    # the same place in both tables of one way
    for one in (found, wanted):
        tiles = one.work[..., 0] + torch.arange(one.work.size(0)).to(one.work)[:, None] * num_tiles
        assert torch.equal(one.bounds[tiles.flatten().long()], one.work.view(-1, 3)[:, 1:].long())


def _counts(work: torch.Tensor) -> torch.Tensor:
    return work[..., 2] - work[..., 1]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.device == wanted.device
    assert torch.equal(found, wanted)
    assert found.is_contiguous() or found.ndim == 2
