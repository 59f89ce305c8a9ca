"""Live row blocks of every key block: the lists that the key kernel of the backward walks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.backends.triton import list_launches
from attnloom.backends.triton.lists import remembered
from attnloom.block_mask import BlockLists


@dataclass(frozen=True, slots=True)
class TransposedLists:
    """blocks: lists of the transposed mask; its rows are key blocks, its entries
    q_block * 2 + partial, ascending. offsets: its row_offsets, int32 below 2**31 entries."""

    blocks: BlockLists
    offsets: torch.Tensor


def transposed_lists(blocks: BlockLists) -> TransposedLists:
    """The transposed lists of a mask; computed once a mask, without waiting for the device."""
    return remembered(_transpose, blocks)


def _transpose(blocks: BlockLists) -> TransposedLists:
    needed = list_launches.turning(sweeps=False)
    if not (list_launches.takes(blocks) and list_launches.are_at_hand(needed)):
        return transposed_by_sort(blocks)
    entries, row_offsets, offsets, _ = list_launches.turn(blocks)
    return TransposedLists(_turned(blocks, row_offsets, entries), offsets)


def transposed_by_sort(blocks: BlockLists) -> TransposedLists:
    """TransposedLists by torch's operators: few, each with a small module, which the first use in a
    process loads."""
    grid = blocks.grid
    place = torch.arange(blocks.entries.numel(), device=blocks.entries.device)
    row = torch.searchsorted(blocks.row_offsets, place, right=True) - 1
    partial, column = blocks.entries & 1, (blocks.entries >> 1).long()
    if grid.num_batches * grid.num_heads > 1:
        unit = row // grid.num_q_blocks
        row, column = row - unit * grid.num_q_blocks, column + unit * grid.num_kv_blocks
    # rows of a column ascend: both are sorted as one number
    bits = (2 * grid.num_q_blocks).bit_length()
    key = ((column << bits) + row * 2 + partial).sort().values
    entries = (key & ((1 << bits) - 1)).int()
    num_columns = grid.num_batches * grid.num_heads * grid.num_kv_blocks
    edges = torch.arange(num_columns + 1, device=entries.device)
    row_offsets = torch.searchsorted(key, edges << bits)
    turned = _turned(blocks, row_offsets, entries)
    narrow = entries.numel() < 2**31
    return TransposedLists(turned, row_offsets.int() if narrow else row_offsets)


def _turned(blocks: BlockLists, row_offsets: torch.Tensor, entries: torch.Tensor) -> BlockLists:
    return BlockLists(
        row_offsets,
        entries,
        blocks.num_batches,
        blocks.num_heads,
        blocks.kv_block,
        blocks.q_block,
        blocks.kv_len,
        blocks.q_len,
    )
