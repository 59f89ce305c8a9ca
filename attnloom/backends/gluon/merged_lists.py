"""Block lists for tiles that hold rows of several blocks of a mask, derived on the mask's device.

A tile of three consumers has 192 queries, over blocks of 128. Its list is the union of the lists of
the blocks that it touches, and each entry says of each consumer, whose rows lie in one block,
whether its block is live and whether it is partial:

    entry = kv_block << FLAG_BITS | sum of (2 + partial) << (2 * consumer) over live consumers

The backward of wide heads has tiles of 96 keys, whose pieces of 32 take the place of consumers, in
lists of the transposed mask (lists_backward.py).

No step waits for the device: sizes are those of the given lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.backends.gluon.configs_forward import ROWS
from attnloom.backends.triton import list_launches
from attnloom.backends.triton.lists import remembered
from attnloom.backends.triton.packed import pack_ints
from attnloom.block_mask import BlockLists

FLAG_BITS = 6
LIMIT = 1 << 24  # entries beyond which the sort takes more memory than it is worth


@dataclass(frozen=True, slots=True)
class MergedLists:
    """bounds: int64 [units * tiles, 2], a tile's first entry and last + 1. work, steps: see
    backends.triton.lists.WorkLists."""

    entries: torch.Tensor
    bounds: torch.Tensor
    work: torch.Tensor
    steps: tuple[float, ...]


def merged_lists(blocks: BlockLists, consumers: int, rows: int = ROWS) -> MergedLists:
    """Lists of tiles of so many consumers of `rows` each; computed once a mask and tile."""
    return remembered(_merge, blocks, consumers, rows)


def _merge(blocks: BlockLists, consumers: int, rows: int = ROWS) -> MergedLists:
    num_tiles = -(-blocks.q_len // (consumers * rows))
    if not _takes(blocks, num_tiles, consumers):
        return merged_by_sort(blocks, consumers, rows)
    parts = blocks.q_block // rows
    entries, bounds = list_launches.join(blocks, num_tiles, consumers, parts, FLAG_BITS)
    units = blocks.num_batches * blocks.num_heads
    work = entries.new_empty((units, num_tiles, 3))
    list_launches.rank(work, bounds, num_tiles, step=2)
    return MergedLists(entries, bounds.view(-1, 2), work, _steps(blocks))


def ask_for_kernels(blocks: BlockLists, consumers: int) -> None:
    """Have those be compiled in a while that will derive such lists, if they are not on disk."""
    _takes(blocks, -(-blocks.q_len // (consumers * ROWS)), consumers)


def _takes(blocks: BlockLists, num_tiles: int, consumers: int) -> bool:
    if not list_launches.takes(blocks, num_tiles * consumers):
        return False
    needed = list_launches.joining(consumers, FLAG_BITS), list_launches.ranking()
    return list_launches.takes_ranks(blocks, num_tiles) and list_launches.are_at_hand(*needed)


def _steps(blocks: BlockLists) -> tuple[float, ...]:
    return pack_ints(
        (
            blocks.num_heads if blocks.num_batches > 1 else 0,
            1 if blocks.num_heads > 1 else 0,
        )
    )


def merged_by_sort(blocks: BlockLists, consumers: int, rows: int = ROWS) -> MergedLists:
    """MergedLists by torch's operators."""
    grid = blocks.grid
    num_units = blocks.num_batches * blocks.num_heads
    num_tiles = -(-blocks.q_len // (consumers * rows))
    keys, flags = _by_consumer(blocks, num_tiles, consumers, rows)
    keys, order = keys.sort()
    flags = flags[order]
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    count = torch.zeros(keys.numel() + 1, dtype=torch.int64, device=keys.device)
    torch.cumsum(first, 0, out=count[1:])
    # a kernel needs an address, also to read nothing from
    entries = keys.new_zeros(max(keys.numel(), 1), dtype=torch.int32)
    place = count[1:] - 1
    kv_block = keys % grid.num_kv_blocks
    head = torch.where(first, kv_block << FLAG_BITS, 0)
    entries.scatter_add_(0, place, (head + flags).int())

    starts = torch.arange(num_units * num_tiles + 1, device=keys.device) * grid.num_kv_blocks
    offsets = count[torch.searchsorted(keys, starts)]
    bounds = torch.stack((offsets[:-1], offsets[1:]), 1)
    offsets, ends = offsets[:-1].view(num_units, -1), offsets[1:].view(num_units, -1)
    # stable: equal tiles keep their order, so that neighbours share keys in the cache
    tile = (ends - offsets).argsort(dim=1, descending=True, stable=True)
    work = torch.stack((tile, offsets.gather(1, tile), ends.gather(1, tile)), 2)
    return MergedLists(entries, bounds, work.int().contiguous(), _steps(blocks))


def _by_consumer(
    blocks: BlockLists, num_tiles: int, consumers: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every live block and every so many rows of it: (unit, tile, kv block) as one number, and
    the flags of the consumer that has them."""
    grid = blocks.grid
    row = blocks.entry_rows()
    unit, q_block = row // grid.num_q_blocks, row % grid.num_q_blocks
    parts = blocks.q_block // rows
    chunk = q_block[:, None] * parts + torch.arange(parts, device=row.device)
    tile, consumer = chunk // consumers, chunk % consumers
    kv_block = (blocks.entries >> 1).long()[:, None]
    keys = (unit[:, None] * num_tiles + tile) * grid.num_kv_blocks + kv_block
    flags = (2 + (blocks.entries & 1).long())[:, None] << (2 * consumer)
    # the last block may reach past the last tile
    inside = tile < num_tiles
    nowhere = num_tiles * blocks.num_batches * blocks.num_heads * grid.num_kv_blocks
    keys = torch.where(inside, keys, nowhere)
    return keys.flatten(), torch.where(inside, flags, 0).flatten()
