"""Live row blocks of every key block: the lists that the key kernel of the backward walks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    grid = blocks.grid
    row = blocks.entry_rows()
    partial, kv_block = blocks.entries & 1, blocks.entries >> 1
    column = row // grid.num_q_blocks * grid.num_kv_blocks + kv_block
    column, order = column.sort(stable=True)  # rows of a column stay in order
    entries = ((row % grid.num_q_blocks) * 2 + partial)[order].int()
    num_columns = grid.num_batches * grid.num_heads * grid.num_kv_blocks
    edges = torch.arange(num_columns + 1, device=entries.device)
    row_offsets = torch.searchsorted(column, edges)
    turned = BlockLists(
        row_offsets,
        entries,
        grid.num_batches,
        grid.num_heads,
        grid.kv_block,
        grid.q_block,
        grid.kv_len,
        grid.q_len,
    )
    narrow = entries.numel() < 2**31
    return TransposedLists(turned, row_offsets.int() if narrow else row_offsets)
