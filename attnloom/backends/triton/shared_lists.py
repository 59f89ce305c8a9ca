"""BlockLists of groups of query heads, for tiles whose rows are heads that share a key head."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnloom.backends.triton.lists import remembered
from attnloom.block_mask import BlockLists


def lists_of_groups(blocks: BlockLists, group: int) -> BlockLists:
    """A mask with one head for each `group`: a block is full where it is full for all of them, and
    live where it is for one. Computed once a mask and group."""
    return remembered(_join_heads, blocks, group)


def _join_heads(blocks: BlockLists, group: int) -> BlockLists:
    grid = blocks.grid
    heads = blocks.num_heads // group
    rows = blocks.entry_rows()
    unit, q_block = rows // grid.num_q_blocks, rows % grid.num_q_blocks
    b, h = unit // blocks.num_heads, unit % blocks.num_heads
    row = (b * heads + h // group) * grid.num_q_blocks + q_block
    tiles = row * grid.num_kv_blocks + (blocks.entries >> 1)
    tiles, which = tiles.unique(return_inverse=True)
    is_full = 1 - (blocks.entries & 1).to(torch.int64)
    num_full = torch.zeros_like(tiles).index_add_(0, which, is_full)
    entries = (tiles % grid.num_kv_blocks) * 2 + (num_full != group)
    counts = torch.bincount(
        tiles // grid.num_kv_blocks, minlength=blocks.num_batches * heads * grid.num_q_blocks
    )
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return replace(blocks, row_offsets=offsets, entries=entries.to(torch.int32), num_heads=heads)
