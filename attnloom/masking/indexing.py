"""mask[...]: which batch entries, heads and rows of tiles an index chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import torch

from attnloom.errors import OptionError, ShapeError, counted
from attnloom.masking.lists import BlockLists, TileGrid, select
from attnloom.masking.views import MaskMod, pick_blocks, pick_index, pick_mod, shift_mod

Index = Union[int, slice, torch.Tensor, Sequence[int]]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen positions of one dimension: [n] int64, or None for all of them in order."""

    size: int
    chosen: torch.Tensor | None

    @property
    def new_size(self) -> int:
        return self.size if self.chosen is None else self.chosen.numel()

    def stored(self, stored_size: int, device: torch.device) -> torch.Tensor:
        """Positions to read from lists, which may store a broadcast dimension once."""
        if stored_size != self.size:
            return torch.zeros(min(self.new_size, 1), dtype=torch.int64, device=device)
        return torch.arange(self.size, device=device) if self.chosen is None else self.chosen


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a mask that an index chooses."""

    batch: Choice
    head: Choice
    row: Choice
    batch_dims: tuple[int, ...]
    q_len: int
    q_block: int

    def lists(self, whole: BlockLists) -> BlockLists:
        device = whole.entries.device
        return select(
            whole,
            self.batch.stored(whole.num_batches, device),
            self.head.stored(whole.num_heads, device),
            self.row.stored(self.row.size, device),
            self.q_len,
        )

    def mod(self, whole: MaskMod) -> MaskMod:
        # A dimension of size 1 broadcasts: the mod sees the real batch entry or head there.
        batch, head = (
            None if choice.chosen is None or choice.size == 1 else pick_index(choice.chosen)
            for choice in (self.batch, self.head)
        )
        rows = self.row.chosen
        if rows is None or not rows.numel():
            return pick_mod(whole, batch, head, None)
        first = int(rows[0])
        following = torch.arange(first, first + rows.numel(), device=rows.device)
        if torch.equal(rows, following):
            return shift_mod(pick_mod(whole, batch, head, None), first * self.q_block)
        return pick_mod(whole, batch, head, pick_blocks(rows, self.q_block))


def choose(
    batch_dims: tuple[int, ...],
    grid: TileGrid,
    index: Index | tuple[Index, ...],
    device: torch.device,
) -> Part:
    """Resolve an index over [*batch_dims, rows of tiles].

    Raises:
        IndexError: out of range, or more indices than dimensions.
        OptionError: an index of another kind, or several tensors at once.
        ShapeError: see `_row_length`.
    """
    indices = index if isinstance(index, tuple) else (index,)
    sizes = (*batch_dims, grid.num_q_blocks)
    if len(indices) > len(sizes):
        raise IndexError(
            f"{counted(len(indices), 'index')} for a BlockMask with "
            f"{counted(len(sizes), 'dimension')} to index (batch, head, row of tiles); keys are "
            "not indexed."
        )
    if sum(isinstance(i, torch.Tensor) and i.dim() > 0 for i in indices) > 1:
        raise OptionError(
            "a BlockMask takes one tensor index at a time, because several would be paired up. "
            "Index step by step: mask[batches][:, heads]."
        )
    chosen = [
        Choice(size, _positions(i, size, device)) for i, size in zip(indices, sizes, strict=False)
    ]
    chosen += [Choice(size, None) for size in sizes[len(chosen) :]]
    *outer, row = chosen
    broadcast = [Choice(1, None)] * (2 - len(outer))
    batch, head = (*broadcast, *outer)
    dims = tuple(choice.new_size for choice in outer)
    return Part(batch, head, row, dims, _row_length(row, grid), grid.q_block)


def _positions(index: Index, size: int, device: torch.device) -> torch.Tensor | None:
    if isinstance(index, slice):
        if index == slice(None):
            return None
        return torch.tensor(range(size)[index], dtype=torch.int64, device=device)
    if isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype is not torch.bool:
        index = int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for a dimension of size {size}.")
        return torch.tensor([index % size], device=device)
    if isinstance(index, (torch.Tensor, list, range)):
        return _from_tensor(torch.as_tensor(index, device=device), size)
    raise OptionError(
        f"a BlockMask is indexed by ints, slices and one-dimensional tensors, not by {index!r}."
    )


def _from_tensor(index: torch.Tensor, size: int) -> torch.Tensor:
    if index.dtype is torch.bool:
        if index.shape != (size,):
            raise IndexError(
                f"a bool index of shape {list(index.shape)} for a dimension of size {size}."
            )
        return index.nonzero().squeeze(1)
    if index.dim() != 1 or index.dtype.is_floating_point:
        raise OptionError(
            f"an index tensor must be one-dimensional and of integers; got {index.dtype} of shape "
            f"{list(index.shape)}."
        )
    index = index.to(torch.int64)
    beyond = (index < -size) | (index >= size)
    if bool(beyond.any()):
        raise IndexError(
            f"index {int(index[beyond][0])} is out of range for a dimension of size {size}."
        )
    return torch.where(index < 0, index + size, index)


def _row_length(row: Choice, grid: TileGrid) -> int:
    """Q_LEN of the chosen rows of tiles; one that overhangs can only come last."""
    if row.chosen is None:
        return grid.q_len
    overhang = grid.num_q_blocks * grid.q_block - grid.q_len
    ragged = (row.chosen == grid.num_q_blocks - 1).nonzero().flatten().tolist()
    count = row.chosen.numel()
    if not overhang or not ragged:
        return count * grid.q_block
    if ragged != [count - 1]:
        raise ShapeError(
            f"row {grid.num_q_blocks - 1} of tiles ends at Q_LEN {grid.q_len}, inside the tile, so "
            "no other row can follow it. Put it last, or choose tokens with rows(start, stop)."
        )
    return count * grid.q_block - overhang
