"""Live row blocks of every key block: the lists that the key kernel of the backward walks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from attnloom.backends.triton.lists import is_capturing
from attnloom.block_mask import BlockLists


@dataclass(frozen=True, slots=True)
class TransposedLists:
    """blocks: lists of the transposed mask; its rows are key blocks, its entries
    q_block * 2 + partial, ascending. offsets: its row_offsets, int32 below 2**31 entries."""

    blocks: BlockLists
    offsets: torch.Tensor


_cache: dict[tuple[int, ...], TransposedLists] = {}


def transposed_lists(blocks: BlockLists) -> TransposedLists:
    """The transposed lists of a mask; computed once a mask, without waiting for the device."""
    tensors = (blocks.row_offsets, blocks.entries)
    # parts of a mask may share one of the two tensors, so that both make the key
    key = (id(tensors[0]), id(tensors[1]), blocks.q_len, blocks.kv_len, blocks.q_block)
    found = _cache.get(key)
    if found is None:
        found = _transpose(blocks)
        if is_capturing(tensors[0]):
            return found  # its memory belongs to a graph, which fills it at replay
        _cache[key] = found
        for tensor in tensors:
            weakref.finalize(tensor, _cache.pop, key, None)
    return found


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
