"""Live blocks as the Triton kernels read them, derived from BlockLists on the mask's device.

No step waits for the device: sizes are those of the given lists, so nothing is counted on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom.backends.triton import configs, list_launches
from attnloom.backends.triton.packed import pack_ints
from attnloom.block_mask import BlockLists
from attnloom.masking.transforms import outside_transforms

_SHORT = 32
_BITS = 63  # of a number that is sorted


@dataclass(frozen=True, slots=True)
class WorkLists:
    """For every row tile where its entries lie in BlockLists.entries.

    work: [units, tiles, 3] int32 (int64 past 2**31 entries): tile, first entry, last entry + 1; in
    a
        unit by falling number of entries. One table, so that a program waits for memory once.
    steps: packed step_b, step_h: unit = b * step_b + h * step_h; a unit is one (b, h) of the mask.
    """

    work: torch.Tensor
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GroupLists:
    """Live blocks of all queries of a group of query heads that share a key head, for decode.

    entries: int32, kv_block * 2 + partial, ascending in a unit. offsets: [units + 1] int32.
    steps: packed step_b, step_h: unit = b * step_b + key head * step_h.
    """

    entries: torch.Tensor
    offsets: torch.Tensor
    steps: tuple[float, ...]


def covering(length: int) -> int:
    """The largest tile side that a length has a use for: one of two, so that lengths compile a
    kernel once more at most."""
    return _SHORT if length <= _SHORT else configs.MAX_TILE


def fitted(blocks: BlockLists) -> BlockLists:
    """The same lists with no larger blocks than a short length has a use for: what lies beyond is
    computed for nothing. It has but one block, so that entries stay."""
    q_block = min(blocks.q_block, _SHORT) if blocks.q_len <= _SHORT else blocks.q_block
    kv_block = min(blocks.kv_block, _SHORT) if blocks.kv_len <= _SHORT else blocks.kv_block
    if (q_block, kv_block) == (blocks.q_block, blocks.kv_block):
        return blocks
    return replace(blocks, q_block=q_block, kv_block=kv_block)


_cache: dict[tuple[object, ...], Any] = {}


def work_lists(blocks: BlockLists, tile_m: int) -> WorkLists:
    """WorkLists of a mask for row tiles of tile_m queries; computed once a mask and tile size."""
    return remembered(_derive_work, blocks, tile_m)


def group_lists(blocks: BlockLists, group: int) -> GroupLists:
    """GroupLists of a mask for groups of `group` query heads; computed once a mask and group."""
    return remembered(_derive_groups, blocks, group)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor is being recorded into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def remembered(derive: Callable[..., Any], blocks: BlockLists, *sizes: int) -> Any:
    """derive(blocks, *sizes), computed once while the tensors of the lists live; what it gives must
    not hold them."""
    # Parts of a mask may share one of the two tensors, so that both make the key.
    tensors = (blocks.row_offsets, blocks.entries)
    shape = (blocks.q_len, blocks.kv_len, blocks.q_block, blocks.kv_block)
    key = (derive, id(tensors[0]), id(tensors[1]), *sizes, *shape)
    found = _cache.get(key)
    if found is None:
        found = outside_transforms(derive)(blocks, *sizes)
        if is_capturing(tensors[0]):
            return found  # its memory belongs to a graph, which fills it at replay
        _cache[key] = found
        for tensor in tensors:
            weakref.finalize(tensor, _cache.pop, key, None)
    return found


def _derive_work(blocks: BlockLists, tile_m: int) -> WorkLists:
    num_tiles = -(-blocks.q_len // tile_m)
    if _ranks_in_kernels(blocks, num_tiles):
        units, num_rows = blocks.num_batches * blocks.num_heads, blocks.grid.num_q_blocks
        narrow = torch.int32 if blocks.entries.numel() < 2**31 else torch.int64
        work = blocks.entries.new_empty((units, num_tiles, 3), dtype=narrow)
        per_block = configs.per_block(blocks.q_block, tile_m)
        list_launches.rank(work, blocks.row_offsets, num_rows, per_block)
        return WorkLists(work, pack_ints(_steps(blocks)))
    return work_by_sort(blocks, tile_m)


def _ranks_in_kernels(blocks: BlockLists, num_tiles: int) -> bool:
    if not list_launches.takes_ranks(blocks, num_tiles):
        return False
    return list_launches.are_at_hand(list_launches.ranking())


def work_by_sort(blocks: BlockLists, tile_m: int) -> WorkLists:
    """WorkLists by torch's operators."""
    starts, counts = _by_tile(blocks, tile_m)
    narrow = torch.int32 if blocks.entries.numel() < 2**31 else torch.int64
    work = torch.empty((*starts.shape, 3), dtype=narrow, device=starts.device)
    tile, first, count = _most_entries_first(blocks, starts, counts)
    work[..., 0] = tile
    work[..., 1] = first
    work[..., 2] = first + count
    return WorkLists(work, pack_ints(_steps(blocks)))


def _by_tile(blocks: BlockLists, tile_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[units, tiles] each: where a tile's entries begin, and how many there are."""
    num_q_blocks = -(-blocks.q_len // blocks.q_block)
    starts = blocks.row_offsets[:-1].view(-1, num_q_blocks)
    counts = blocks.row_offsets.diff().view(-1, num_q_blocks)
    per_block = configs.per_block(blocks.q_block, tile_m)
    if per_block == 1:
        return starts, counts
    num_tiles = -(-blocks.q_len // tile_m)
    starts, counts = (t.repeat_interleave(per_block, dim=1) for t in (starts, counts))
    return starts[:, :num_tiles], counts[:, :num_tiles]


def _most_entries_first(
    blocks: BlockLists, starts: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles of each unit with their starts and counts, [units, tiles] each, by falling counts.

    Equal tiles keep their order, so that neighbours share keys in the cache. All three are sorted
    as one number where 63 bits hold it: the first use of an operator in a process loads its
    module, and indexing has one of the largest.
    """
    num_tiles, num_entries = starts.size(1), blocks.entries.numel()
    most = -(-blocks.kv_len // blocks.kv_block)
    tile_bits, start_bits = num_tiles.bit_length(), num_entries.bit_length()
    tile = torch.arange(num_tiles, device=starts.device)
    if most.bit_length() + tile_bits + start_bits > _BITS:
        tile = counts.argsort(dim=1, descending=True, stable=True)
        return tile, starts.gather(1, tile), counts.gather(1, tile)
    key = ((most - counts) << (tile_bits + start_bits)) + (tile << start_bits) + starts
    key = key.sort(dim=1).values
    return (
        (key >> start_bits) & ((1 << tile_bits) - 1),
        key & ((1 << start_bits) - 1),
        most - (key >> (tile_bits + start_bits)),
    )


def _derive_groups(blocks: BlockLists, group: int) -> GroupLists:
    """A block is full for a group where it is full in each of its rows of blocks, and live where it
    is live in one."""
    num_q_blocks = -(-blocks.q_len // blocks.q_block)
    num_kv_blocks = -(-blocks.kv_len // blocks.kv_block)
    by_head = blocks.num_heads > 1
    heads = blocks.num_heads // group if by_head else 1
    rows_a_unit = (group if by_head else 1) * num_q_blocks
    num_units = blocks.num_batches * heads
    at = blocks.entry_rows() // rows_a_unit * num_kv_blocks + (blocks.entries >> 1)
    count = at.new_zeros(num_units * num_kv_blocks)
    live = count.scatter_add(0, at, torch.ones_like(at))
    full = count.scatter_add(0, at, 1 - (blocks.entries & 1).long())
    block = torch.arange(num_kv_blocks, device=at.device).repeat(num_units)
    starts = torch.arange(0, live.numel() + 1, num_kv_blocks, device=at.device)
    offsets, entries = _select(block * 2 + (full != rows_a_unit), live > 0, starts)
    steps = (heads if blocks.num_batches > 1 else 0, 1 if by_head else 0)
    return GroupLists(entries, offsets, pack_ints(steps))


def _steps(blocks: BlockLists) -> tuple[int, int]:
    return (
        blocks.num_heads if blocks.num_batches > 1 else 0,
        1 if blocks.num_heads > 1 else 0,
    )


def _select(
    values: torch.Tensor, keep: torch.Tensor, row_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and values of the kept entries, compacted in order without a host synchronisation."""
    count = torch.zeros(values.numel() + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(keep, 0, out=count[1:])
    # dropped entries all land in one slot past the end
    target = torch.where(keep, count[:-1], values.numel())
    out = torch.zeros(values.numel() + 1, dtype=torch.int32, device=values.device)
    out.scatter_(0, target, values.int())
    offsets = count[row_offsets]
    narrow = values.numel() < 2**31
    return (offsets.int() if narrow else offsets), out
