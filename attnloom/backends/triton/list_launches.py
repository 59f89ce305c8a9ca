"""Launches of list_kernels.py: what the operators of lists.py, transposed.py and others derive.

Taken are lists on a GPU that are not so long that counting loses to sorting. Where a kernel is on
no disk yet, torch's operators derive the same: it is compiled a while later, so that the first call
of a machine does not wait for it, too, and every later process has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnloom.backends.triton.beside import Job, may_begin_quickly
from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.launcher import Launcher, are_aligned
from attnloom.backends.triton.list_kernels import join_kernel, rank_kernel, turn_kernel
from attnloom.backends.triton.packed import pack_ints
from attnloom.block_mask import BlockLists

_MOST_PAIRS = 1 << 25  # of rows and columns: 256 units of 46,000 tokens, one of 700,000 (H200)
_MOST_COMPARED = 1 << 34  # tiles with each other
_LANES = 128
_RANKED_LANES = 32


@dataclass(frozen=True, repr=False)
class RankConfig(KernelConfig):
    LANES: int

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class TurnConfig(KernelConfig):
    SWEEPS: bool
    LANES: int

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class JoinConfig(KernelConfig):
    CONSUMERS: int
    FLAG_BITS: int
    LANES: int

    __hash__ = KernelConfig.__hash__


_launches: dict[tuple[object, ...], Launcher] = {}
_LATER = 1.5  # seconds, in which most first calls are over


@dataclass(frozen=True)
class Needed:
    """A kernel that lists are derived by. types: of its tensors. num_sizes: that it is told."""

    kernel: Any
    config: KernelConfig
    types: tuple[torch.dtype, ...]
    num_sizes: int

    def launcher(self, grid: int) -> Launcher:
        return Launcher(self.kernel, self.config, grid, {"num_warps": 1})


_asked: dict[tuple[Needed, int], Job] = {}


def ranking() -> Needed:
    """Of lists with fewer than 2**31 entries."""
    return Needed(rank_kernel, RankConfig(_RANKED_LANES), (torch.int32, torch.int64), 4)


def turning(sweeps: bool) -> Needed:
    entries, offsets = torch.int32, torch.int64
    types = entries, offsets, entries, entries, entries, offsets
    return Needed(turn_kernel, TurnConfig(sweeps, _LANES), types, 5)


def joining(consumers: int, flag_bits: int) -> Needed:
    types = torch.int32, torch.int64, torch.int32, torch.int64
    return Needed(join_kernel, JoinConfig(consumers, flag_bits, _LANES), types, 5)


def are_at_hand(*needed: Needed) -> bool:
    """Whether kernels need not be compiled now; those that are not will be in a while."""
    return not may_begin_quickly() or all([_is_at_hand(one) for one in needed])  # noqa: C419 - all


def _is_at_hand(needed: Needed) -> bool:
    place = needed, torch.cuda.current_device() if torch.cuda.is_available() else -1
    job = _asked.get(place)
    if job is None:
        # an address that is aligned, and no memory
        tensors = [torch.empty(1, dtype=dtype, device="meta") for dtype in needed.types]
        launch = needed.launcher(1), (*tensors, pack_ints((0,) * needed.num_sizes))
        job = Job([launch], look=True)
        job.wait()
        if job.missed:
            _asked[place] = Job([launch], after=_LATER)
            return False
        _asked[place] = job
    return job.made.done() and job.made.exception() is None


def takes(blocks: BlockLists, rows: int | None = None) -> bool:
    """Whether lists are turned and joined here. rows: of a unit, where they are not its blocks."""
    grid = blocks.grid
    units = grid.num_batches * grid.num_heads
    pairs = units * (rows or grid.num_q_blocks) * grid.num_kv_blocks
    return _runs_here(blocks) and 0 < blocks.entries.numel() < 2**31 and pairs <= _MOST_PAIRS


def takes_ranks(blocks: BlockLists, num_tiles: int) -> bool:
    """Whether tiles of the lists are put in order here."""
    compared = blocks.num_batches * blocks.num_heads * num_tiles**2
    return _runs_here(blocks) and 0 < compared <= _MOST_COMPARED


def _runs_here(blocks: BlockLists) -> bool:
    return blocks.entries.is_cuda


def rank(
    work: torch.Tensor, bounds: torch.Tensor, num_rows: int, per_row: int = 1, step: int = 1
) -> None:
    """Fill `work` [units, tiles, 3]; see rank_kernel."""
    units, num_tiles, _ = work.shape
    sizes = num_tiles, num_rows, per_row, step
    grid = units * -(-num_tiles // _RANKED_LANES)
    _launch(ranking(), grid, (work, bounds), sizes)


def turn(blocks: BlockLists, slack: int | None = None) -> tuple[torch.Tensor, ...]:
    """(entries, offsets int64, offsets int32, window) of turn_kernel.

    Args:
        slack: rows that windows of SweptLists have beyond those of blocks; None for
            TransposedLists, which have no window.
    """
    grid, sweeps = blocks.grid, slack is not None
    num_columns = grid.num_batches * grid.num_heads * grid.num_kv_blocks
    entries = torch.empty_like(blocks.entries)
    if sweeps:
        entries = blocks.entries.new_empty(blocks.entries.numel() + 1)
    offsets = blocks.row_offsets.new_empty(num_columns + 1)
    narrow = blocks.entries.new_empty(num_columns + 1)
    window = blocks.entries.new_zeros(1) if sweeps else narrow  # a kernel needs an address
    sizes = grid.num_q_blocks, grid.num_kv_blocks, _halvings(blocks), blocks.q_block, slack or 0
    tensors = entries, offsets, narrow, window, blocks.entries, blocks.row_offsets
    _launch(turning(sweeps), num_columns, tensors, sizes)
    return entries, offsets, narrow, window


def join(
    blocks: BlockLists, num_tiles: int, consumers: int, parts: int, flag_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries, bounds) of join_kernel. consumers: of a tile. parts: those a row of blocks has."""
    grid = blocks.grid
    num_programs = grid.num_batches * grid.num_heads * num_tiles
    joined = blocks.entries.new_empty(blocks.entries.numel() * parts)
    bounds = blocks.row_offsets.new_empty(2 * num_programs)
    sizes = num_tiles, grid.num_q_blocks, grid.num_kv_blocks, _halvings(blocks), parts
    tensors = joined, bounds, blocks.entries, blocks.row_offsets
    _launch(joining(consumers, flag_bits), num_programs, tensors, sizes)
    return joined, bounds


def _halvings(blocks: BlockLists) -> int:
    """Until one place is left of a row's entries."""
    return blocks.grid.num_kv_blocks.bit_length()


def _launch(
    needed: Needed, grid: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> None:
    key = (needed, grid, tensors[0].device, *[t.dtype for t in tensors])
    launch = _launches.get(key)
    if launch is None:
        launch = needed.launcher(grid)
        keep(_launches, key, launch)
    launch(are_aligned(tensors), *tensors, pack_ints(sizes))
