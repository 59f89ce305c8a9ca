"""Intervals: the range that a value is known to lie in, for many tiles at once.

An Interval is a pair of tensors that broadcast, bool for BOOL, int64 for integers and float64 for
floats, both ends included. For BOOL, lo says "certainly true" and hi "possibly true".

    NaN         a value that may be NaN has the interval (-inf, inf), and only such a value may be.
    rounding    float ends are moved outward to float32 numbers. Arithmetic that rounds to nearest
                is monotone, so this covers float32, float64 and fused multiply-add alike, and ends
                that float32 can hold stay sharp.
    overflow    `reach` bounds the magnitude of an integer interval by a Python int. While it fits
                the type nothing can wrap and nothing is checked; beyond, each element is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnloom.ir.node import DType

Tensor = torch.Tensor

INT_LIMITS = {
    DType.U8: (0, 255),
    DType.I8: (-(2**7), 2**7 - 1),
    DType.I16: (-(2**15), 2**15 - 1),
    DType.I32: (-(2**31), 2**31 - 1),
    DType.I64: (-(2**63), 2**63 - 1),
}
_TINY = 2.0**-126  # below it float32 is denormal and kernels may flush to zero
# More than the error of any approximation that a kernel may use.
_SLACK_RELATIVE = 2.0**-18
_SLACK_ABSOLUTE = 2.0**-20


@dataclass(frozen=True, slots=True)
class Interval:
    """lo, hi: ends, included. reach: at least max(|lo|, |hi|), for integers only."""

    lo: Tensor
    hi: Tensor
    reach: int = 0


IntervalRule = Callable[[tuple[Interval, ...], DType], Interval]


def constant(value: bool | int | float, dtype: torch.dtype | None = None) -> Tensor:
    """Without dimensions, on the CPU whatever torch's default device: it meets tensors of any."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def unknown(dtype: DType) -> Interval:
    """Every value of the type."""
    if dtype is DType.BOOL:
        return Interval(constant(False), constant(True))
    if dtype.is_float:
        infinity = constant(math.inf, dtype=torch.float64)
        return Interval(-infinity, infinity)
    lo, hi = INT_LIMITS[dtype]
    return Interval(constant(lo), constant(hi), max(-lo, hi))


def point(value: bool | int | float, dtype: DType) -> Interval:
    """One constant."""
    if dtype is DType.BOOL:
        flag = constant(bool(value))
        return Interval(flag, flag)
    if dtype.is_float:
        end = constant(float(value), dtype=torch.float64)
        return spread_nan(end, end) if dtype is DType.F64 else outward(end, end, dtype)
    end = constant(int(value))
    return Interval(end, end, abs(int(value)))


def between(lo: Tensor, hi: Tensor, dtype: DType) -> Interval:
    """An interval given by its ends, for instance the minimum and maximum of a block."""
    if dtype is DType.BOOL:
        return Interval(lo.to(torch.bool), hi.to(torch.bool))
    if dtype.is_float:
        lo, hi = lo.to(torch.float64), hi.to(torch.float64)
        return spread_nan(lo, hi) if dtype is DType.F64 else outward(lo, hi, dtype)
    lo, hi = lo.to(torch.int64), hi.to(torch.int64)
    if lo.numel() == 0 or hi.numel() == 0:
        return Interval(lo, hi, 0)
    return Interval(lo, hi, max(-int(lo.min()), int(hi.max()), 0))


def outward(lo: Tensor, hi: Tensor, dtype: DType, *operands: Interval) -> Interval:
    """A float interval widened for rounding, and unknown where NaN may appear."""
    if dtype is DType.F32:
        low, high = lo.float(), hi.float()
        lo = torch.where(low > lo, torch.nextafter(low, low.new_tensor(-math.inf)), low).double()
        hi = torch.where(high < hi, torch.nextafter(high, high.new_tensor(math.inf)), high).double()
    else:
        lo = torch.nextafter(lo, lo.new_tensor(-math.inf))
        hi = torch.nextafter(hi, hi.new_tensor(math.inf))
    lo = torch.where((lo > 0) & (lo < _TINY), 0.0, lo)
    hi = torch.where((hi < 0) & (hi > -_TINY), 0.0, hi)
    return spread_nan(lo, hi, *operands)


def widened(lo: Tensor, hi: Tensor, dtype: DType, *operands: Interval) -> Interval:
    """As `outward`, and wider than any kernel's approximation of a transcendental function."""
    lo = lo - lo.abs() * _SLACK_RELATIVE - _SLACK_ABSOLUTE
    hi = hi + hi.abs() * _SLACK_RELATIVE + _SLACK_ABSOLUTE
    return outward(lo, hi, dtype, *operands)


def spread_nan(lo: Tensor, hi: Tensor, *operands: Interval) -> Interval:
    """Unknown where an operand may be NaN or an end is."""
    open_ = lo.isnan() | hi.isnan()
    for operand in operands:
        open_ = open_ | maybe_nan(operand)
    return Interval(torch.where(open_, -math.inf, lo), torch.where(open_, math.inf, hi))


def maybe_nan(x: Interval) -> Tensor:
    return (x.lo == -math.inf) & (x.hi == math.inf)


def integer(lo: Tensor, hi: Tensor, reach: int, dtype: DType) -> Interval:
    """An integer interval, unknown where it leaves the type; exact ends while reach < 2^63."""
    least, most = INT_LIMITS[dtype]
    if reach <= most and least:
        return Interval(lo, hi, reach)
    if reach > INT_LIMITS[DType.I64][1]:
        return unknown(dtype)
    out = (lo < least) | (hi > most)
    return Interval(torch.where(out, least, lo), torch.where(out, most, hi), max(-least, most))


def hull(*ends: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest; NaN wins, so that it is not lost."""
    lo = hi = ends[0]
    for end in ends[1:]:
        lo, hi = torch.minimum(lo, end), torch.maximum(hi, end)
    return lo, hi


def corners(
    f: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval
) -> tuple[Tensor, Tensor]:
    """Range of f that is monotone in each operand while the other is fixed."""
    return hull(f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi))


def single(x: Interval) -> float | int | None:
    """The value of an interval that is one number everywhere."""
    if x.lo.numel() != 1 or x.hi.numel() != 1 or x.lo.item() != x.hi.item():
        return None
    return x.lo.item()
