"""Refined lists hold the same scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attnloom
from attnloom.masking.lists import BlockLists
from attnloom.masking.refine import refine, tells_apart
from attnloom.trace.tracer import trace_mask

CPU = torch.device("cpu")
IDS = torch.arange(600) // 70


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return (q >= kv) & (IDS[q] == IDS[kv])


def by_head(b, h, q, kv):
    return (q - kv).abs() <= 40 * (h + 1) + 150 * b


def dense(lists: BlockLists) -> torch.Tensor:
    """0 where no tile is, 1 in partial and 2 in full ones: [units, q_len, kv_len]."""
    grid = lists.grid
    kinds = torch.zeros(
        lists.num_batches * lists.num_heads, grid.num_q_blocks, grid.num_kv_blocks,
        dtype=torch.int64,
    )  # fmt: skip
    rows = lists.entry_rows()
    kinds.view(-1, grid.num_kv_blocks)[rows, lists.entries >> 1] = 2 - (lists.entries & 1).long()
    full = kinds.repeat_interleave(lists.q_block, 1).repeat_interleave(lists.kv_block, 2)
    return full[:, : lists.q_len, : lists.kv_len]


@pytest.mark.parametrize("sides", [(64, 64), (64, 128), (128, 32)])
@pytest.mark.parametrize("mod", [causal, documents, by_head])
@pytest.mark.parametrize("lengths", [(600, 600), (500, 300), (128, 256)])
def test_the_same_lists_as_built_small(
    mod: Callable, lengths: tuple[int, int], sides: tuple[int, int]
) -> None:
    heads = (2, 3) if mod is by_head else (None, None)
    coarse, fine = (
        attnloom.create_block_mask(mod, *heads, *lengths, "cpu", BLOCK_SIZE=side).lists()
        for side in (128, sides)
    )
    if mod is by_head and min(coarse.num_heads, coarse.num_batches) == 1:
        assert not tells_apart(trace_mask(mod, CPU), coarse)
        return
    made = refine(trace_mask(mod, CPU), coarse, sides)
    assert made.grid == fine.grid
    assert torch.equal(made.row_offsets, fine.row_offsets)
    assert torch.equal(made.entries, fine.entries)


def test_what_the_lists_leave_out_stays_out() -> None:
    """Lists may be anything: here the mask's, less some tiles, and one of them called full."""
    whole = attnloom.create_block_mask(causal, None, None, 512, 512, "cpu").lists()
    entries = torch.tensor([0, 1, 3, 2, 5], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 3, 4, 5])
    given = BlockLists(offsets, entries, 1, 1, 128, 128, 512, 512)
    made = refine(trace_mask(causal, CPU), given, (64, 64))
    assert whole.grid == given.grid
    before, after = dense(given), dense(made)
    assert bool((after[before == 0] == 0).all())
    assert bool((after[before == 2] == 2).all())
    positions = torch.arange(512)
    kept = (positions[:, None] >= positions) & (before[0] == 1)
    assert bool((after[0][kept] > 0).all())


def test_positions_of_views_are_shifted() -> None:
    mask = attnloom.create_block_mask(documents, None, None, 512, 512, "cpu").rows(256, 512)
    lists = mask.lists()
    made = refine(trace_mask(mask.mask_mod, CPU), lists, (64, 64))
    small = attnloom.create_block_mask(documents, None, None, 512, 512, "cpu", BLOCK_SIZE=64)
    expected = small.rows(256, 512).lists()
    assert (made.q_offset, made.kv_offset) == (lists.q_offset, lists.kv_offset)
    assert torch.equal(made.row_offsets, expected.row_offsets)
    assert torch.equal(made.entries, expected.entries)
