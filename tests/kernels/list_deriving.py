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


def check_merged(blocks: BlockLists, consumers: int) -> None:
    """Lists of tiles; where they lie is each way's own affair."""
    num_tiles = -(-blocks.q_len // (consumers * merged_lists.ROWS))
    assert merged_lists._takes(blocks, num_tiles, consumers)
    found, work, steps = merged_lists._merge(blocks, consumers)
    wanted, wanted_work, wanted_steps = merged_lists.merged_by_sort(blocks, consumers)
    assert steps == wanted_steps and found.numel() == wanted.numel()
    same(work[..., 0], wanted_work[..., 0])
    same(work[..., 2] - work[..., 1], wanted_work[..., 2] - wanted_work[..., 1])
    places, wanted_places = work.view(-1, 3).tolist(), wanted_work.view(-1, 3).tolist()
    for (_, first, last), (_, begin, end) in zip(places, wanted_places, strict=True):
        assert found[first:last].tolist() == wanted[begin:end].tolist()


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.device == wanted.device
    assert torch.equal(found, wanted)
    assert found.is_contiguous() or found.ndim == 2
