"""Smallest and largest element of a captured tensor between two indices, for many pairs at once.

A table read at a distance, `near[h, q_idx - kv_idx]`, or at a block, `chosen[q_idx, kv_idx // 64]`,
is read between two places of one dimension over a rectangle of scores. A sparse table of that
dimension holds the range of every run of 1, 2, 4, ... elements; two runs that overlap cover any
pair. Large tensors are kept by groups of elements, whose runs reach a little too far: ranges are
then wider than need be, never too narrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.ir.interval import Interval
from attnloom.ir.node import DType

MAX_ELEMENTS = 1 << 22  # of one sparse table

Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SparseTable:
    """Ranges of runs along one dimension of a tensor.

    lo, hi: [runs' lengths, *shape], runs of 2 ** i groups from each on; where a run would reach
    beyond the end it is cut. group: elements that are looked at together.
    """

    dim: int
    size: int
    group: int
    lo: torch.Tensor
    hi: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor, dtype: DType, dim: int) -> SparseTable:
        """tensor: at least one element. dtype: of the node that reads it."""
        size = tensor.size(dim)
        group = 1
        while tensor.numel() // size * -(-size // group) * (size // group).bit_length() > (
            MAX_ELEMENTS
        ):
            group *= 2
        wide = torch.float64 if dtype.is_float else torch.int64
        values = tensor.detach()
        values = values if dtype is DType.BOOL else values.to(wide)
        lo, hi = _by_group(values, dim, group)
        lows, highs, length = [lo], [hi], 1
        while 2 * length <= lo.size(dim):
            lows.append(_joined(lows[-1], dim, length, smallest=True))
            highs.append(_joined(highs[-1], dim, length, smallest=False))
            length *= 2
        return SparseTable(dim, size, group, torch.stack(lows), torch.stack(highs))

    def between(self, places: list[torch.Tensor], first: torch.Tensor, last: torch.Tensor) -> Range:
        """Range of elements first .. last of the dimension, at `places` of the others.

        places: an index into each dimension, all in range; that of `dim` is not looked at.
        first, last: in range, first <= last.
        """
        first, last = first // self.group, last // self.group
        exponent = (last - first + 1).log2().floor().to(torch.int64)
        # Float32 of a length just below a power of two may round up to it.
        exponent = torch.where((1 << exponent) > last - first + 1, exponent - 1, exponent)
        second = last - (1 << exponent) + 1
        at, then = list(places), list(places)
        at[self.dim], then[self.dim] = first, second
        lo = _least(self.lo[(exponent, *at)], self.lo[(exponent, *then)])
        hi = _greatest(self.hi[(exponent, *at)], self.hi[(exponent, *then)])
        return lo, hi


def element_range(
    tensor: torch.Tensor,
    dtype: DType,
    at: list[Interval],
    whole: Range,
    tables: dict[int, SparseTable],
) -> Range:
    """What a load reads whose indices lie in intervals: lanes that broadcast.

    Exact where all indices but one are single values; the range of the whole tensor elsewhere, and
    where an interval holds negative indices beside others.

    Args:
        whole: smallest and largest element of the tensor.
        tables: of its dimensions, filled as they are needed.
    """
    if not tensor.numel():
        return whole
    lo, hi = whole
    places = [_in_range(p.lo, size) for p, size in zip(at, tensor.shape, strict=True)]
    single = [p.lo == p.hi for p in at]
    alone = _all(single)
    if bool(alone.any()):
        value = tensor.detach()[tuple(places)].to(lo.dtype)
        lo, hi = torch.where(alone, value, lo), torch.where(alone, value, hi)
    for dim, interval in enumerate(at):
        one_sign = (interval.lo >= 0) | (interval.hi < 0)
        others = _all([s for place, s in enumerate(single) if place != dim])
        known = others & ~single[dim] & one_sign
        if not bool(known.any()):
            continue
        if dim not in tables:
            tables[dim] = SparseTable.of(tensor, dtype, dim)
        last = torch.maximum(_in_range(interval.hi, tensor.size(dim)), places[dim])
        found = tables[dim].between(torch.broadcast_tensors(*places, last)[:-1], places[dim], last)
        lo, hi = torch.where(known, found[0], lo), torch.where(known, found[1], hi)
    return lo, hi


def _in_range(index: torch.Tensor, size: int) -> torch.Tensor:
    """Where a load with this index reads: from the end if it is negative, and never outside."""
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def _all(conditions: list[torch.Tensor]) -> torch.Tensor:
    found = torch.ones((), dtype=torch.bool)
    for condition in conditions:
        found = found.to(condition.device) & condition
    return found


def _by_group(values: torch.Tensor, dim: int, group: int) -> Range:
    size = values.size(dim)
    if group == 1:
        return values, values
    missing = -size % group
    if missing:
        end = values.narrow(dim, size - 1, 1)
        values = torch.cat([values, *[end] * missing], dim)
    grouped = values.unflatten(dim, (-1, group))
    if values.dtype is torch.bool:
        return grouped.all(dim + 1), grouped.any(dim + 1)
    return grouped.amin(dim + 1), grouped.amax(dim + 1)


def _joined(runs: torch.Tensor, dim: int, length: int, *, smallest: bool) -> torch.Tensor:
    """Runs twice as long: each with the one that begins where it ends; those at the end stay."""
    count = runs.size(dim) - length
    join = _least if smallest else _greatest
    joined = join(runs.narrow(dim, 0, count), runs.narrow(dim, length, count))
    return torch.cat([joined, runs.narrow(dim, count, length)], dim)


def _least(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a & b if a.dtype is torch.bool else torch.minimum(a, b)


def _greatest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a | b if a.dtype is torch.bool else torch.maximum(a, b)
