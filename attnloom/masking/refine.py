"""Smaller tiles inside the live tiles of a mask.

Only what the given lists hold is looked at: a full tile becomes full ones, a partial tile is
evaluated and becomes full, partial and dropped ones. So the meaning of the lists stays, also where
they are not what the mask_mod alone would give.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram
from attnloom.masking.lists import BlockLists, TileGrid, lists_from_keys

_SCORES_AT_ONCE = 1 << 24


def refine(bound: BoundProgram, lists: BlockLists, sides: tuple[int, int]) -> BlockLists:
    """The same live scores in tiles of sides[0] queries x sides[1] keys, which divide those of the
    blocks.

    Waits for the device: the number of tiles is not known before. `tells_apart` must hold.
    """
    assert tells_apart(bound, lists)
    parts = lists.q_block // sides[0], lists.kv_block // sides[1]
    device = lists.entries.device
    unit, q_block, kv_block = _places(lists)
    down, across = (torch.arange(n, device=device) for n in parts)
    q_tile = q_block[:, None, None] * parts[0] + down[:, None]  # [entries, parts, 1]
    kv_tile = kv_block[:, None, None] * parts[1] + across  # [entries, 1, parts]
    live = (q_tile * sides[0] < lists.q_len) & (kv_tile * sides[1] < lists.kv_len)
    full = torch.ones_like(live)
    mixed = (lists.entries & 1).nonzero().squeeze(1)
    for some in mixed.split(max(1, _SCORES_AT_ONCE // (lists.q_block * lists.kv_block))):
        any_kept, all_kept = _evaluate(
            bound, lists, sides, (unit[some], q_block[some], kv_block[some])
        )
        live[some] &= any_kept
        full[some] = all_kept
    grid = TileGrid(lists.num_batches, lists.num_heads, lists.q_len, lists.kv_len, *sides)
    row = unit[:, None, None] * grid.num_q_blocks + q_tile
    entry = kv_tile * 2 + ~full
    made = lists_from_keys(grid, row.expand(live.shape)[live], entry[live])
    return replace(made, q_offset=lists.q_offset, kv_offset=lists.kv_offset)


def tells_apart(bound: BoundProgram, lists: BlockLists) -> bool:
    """Whether the lists have an entry for every batch and head that the mask distinguishes. Lists
    that are equal in all of them are stored once, and smaller tiles need not be equal."""
    axes = bound.program.axes[bound.program.outputs[0]]
    return not (
        (axes & Axes.B and lists.num_batches == 1) or (axes & Axes.H and lists.num_heads == 1)
    )


Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _places(lists: BlockLists) -> Places:
    """Unit (b, h), query block and key block of each entry."""
    row, num_q_blocks = lists.entry_rows(), lists.grid.num_q_blocks
    return row // num_q_blocks, row % num_q_blocks, (lists.entries >> 1).long()


def _evaluate(
    bound: BoundProgram, lists: BlockLists, sides: tuple[int, int], places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether some and whether all scores of each small tile are kept: [entries, parts, parts]."""
    unit, q_block, kv_block = (x[:, None, None] for x in places)
    device = lists.entries.device
    q = q_block * lists.q_block + torch.arange(lists.q_block, device=device)[:, None]
    kv = kv_block * lists.kv_block + torch.arange(lists.kv_block, device=device)
    positions = {
        "b": unit // lists.num_heads,
        "h": unit % lists.num_heads,
        "q": q + lists.q_offset,
        "kv": kv + lists.kv_offset,
    }
    (kept,) = interpret(bound, positions)
    inside = (q < lists.q_len) & (kv < lists.kv_len)
    down, across = lists.q_block // sides[0], lists.kv_block // sides[1]
    shape = (-1, down, sides[0], across, sides[1])
    some = (kept & inside).reshape(shape).amax((2, 4))
    every = (kept | ~inside).reshape(shape).amin((2, 4))
    return some, every
