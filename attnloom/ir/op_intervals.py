"""Interval rules: what an operation's result can be when each operand lies in a known range.

Every rule is sound: each value that the operation can give, for operands inside their intervals, is
inside the result; `interval.py` says how NaN, rounding and overflow are covered. A rule may be
loose where masks do not need it (functions of floats), but is tight for what joins two positions:
sums, differences, products by a constant, whole quotients, remainders within one period,
comparisons and logic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attnloom.ir.interval import (
    INT_LIMITS,
    Interval,
    IntervalRule,
    constant,
    corners,
    integer,
    maybe_nan,
    outward,
    point,
    single,
    spread_nan,
    unknown,
    widened,
)
from attnloom.ir.node import DType

Tensor = torch.Tensor
Args = tuple[Interval, ...]
_MOST = INT_LIMITS[DType.I64][1]


def add(args: Args, dtype: DType) -> Interval:
    a, b = args
    if dtype.is_float:
        return outward(a.lo + b.lo, a.hi + b.hi, dtype, a, b)
    return integer(a.lo + b.lo, a.hi + b.hi, a.reach + b.reach, dtype)


def sub(args: Args, dtype: DType) -> Interval:
    a, b = args
    if dtype.is_float:
        return outward(a.lo - b.hi, a.hi - b.lo, dtype, a, b)
    return integer(a.lo - b.hi, a.hi - b.lo, a.reach + b.reach, dtype)


def mul(args: Args, dtype: DType) -> Interval:
    a, b = args
    lo, hi = corners(torch.mul, a, b)
    if dtype.is_float:
        return outward(lo, hi, dtype, a, b)
    return integer(lo, hi, a.reach * b.reach, dtype)


def neg(args: Args, dtype: DType) -> Interval:
    (a,) = args
    if dtype.is_float:
        return Interval(-a.hi, -a.lo)
    return integer(-a.hi, -a.lo, a.reach, dtype)


def absolute(args: Args, dtype: DType) -> Interval:
    (a,) = args
    lo, hi = torch.maximum(a.lo, -a.hi).clamp(min=0), torch.maximum(-a.lo, a.hi)
    return spread_nan(lo, hi, a) if dtype.is_float else integer(lo, hi, a.reach, dtype)


def _has_zero(x: Interval) -> Tensor:
    return (x.lo <= 0) & (x.hi >= 0)


def _infinite(x: Interval) -> Tensor:
    return (x.lo == -math.inf) | (x.hi == math.inf)


def _unknown_where(bad: Tensor, x: Interval) -> Interval:
    return Interval(torch.where(bad, -math.inf, x.lo), torch.where(bad, math.inf, x.hi))


def _quotient(a: Interval, b: Interval, dtype: DType) -> Interval:
    """Real quotient of floats; unknown where the divisor may be zero."""
    lo, hi = corners(torch.div, a, b)
    return _unknown_where(_has_zero(b), outward(lo, hi, dtype, a, b))


def div(args: Args, dtype: DType) -> Interval:
    a, b = args
    return _quotient(a, b, dtype)


def reciprocal(args: Args, dtype: DType) -> Interval:
    return _quotient(point(1, dtype), args[0], dtype)


def whole_quotient(mode: str) -> IntervalRule:
    """Quotient rounded by `mode`, floor or trunc; an integer divided by zero is 0."""
    rounding = {"floor": torch.floor, "trunc": torch.trunc}[mode]

    def rule(args: Args, dtype: DType) -> Interval:
        a, b = args
        if dtype.is_float:
            real = _quotient(a, b, dtype)
            # An operation that rounds its quotient first is covered as the ends are outward.
            wide = outward(rounding(real.lo), rounding(real.hi), dtype, real)
            return _unknown_where(_infinite(a) | _infinite(b), wide)
        zero = _has_zero(b)
        safe = Interval(torch.where(zero, 1, b.lo), torch.where(zero, 1, b.hi))
        # The least I64 divided by -1 traps; its reach makes the result unknown anyway.
        a = Interval(a.lo.clamp(min=-_MOST), a.hi.clamp(min=-_MOST), a.reach)
        lo, hi = corners(lambda x, y: torch.div(x, y, rounding_mode=mode), a, safe)
        size = torch.maximum(-a.lo, a.hi)
        lo, hi = torch.where(zero, -size, lo), torch.where(zero, size, hi)
        return integer(lo, hi, a.reach + 1, dtype)

    return rule


floordiv = whole_quotient("floor")
truncdiv = whole_quotient("trunc")


def mod(args: Args, dtype: DType) -> Interval:
    """Remainder with the divisor's sign."""
    a, b = args
    if dtype.is_float:
        return _float_remainder(a, b, b.lo.clamp(max=0), b.hi.clamp(min=0))
    lo, hi = (b.lo + 1).clamp(max=0), (b.hi - 1).clamp(min=0)
    divisor = single(b)
    if divisor not in (None, 0, -1):
        # Between two multiples of the divisor the remainder is a line.
        first, last = (torch.div(end, divisor, rounding_mode="floor") for end in (a.lo, a.hi))
        line = first == last
        lo = torch.where(line, a.lo - first * divisor, lo)
        hi = torch.where(line, a.hi - last * divisor, hi)
    return integer(lo, hi, b.reach, dtype)


def fmod(args: Args, dtype: DType) -> Interval:
    """Remainder with the dividend's sign, never larger than the dividend."""
    a, b = args
    if dtype.is_float:
        size = torch.maximum(-b.lo, b.hi)
    elif b.reach > _MOST:
        size = b.hi.new_tensor(_MOST)
    else:
        size = (torch.maximum(-b.lo, b.hi) - 1).clamp(min=0)
    lo = torch.maximum(a.lo.clamp(max=0), -size)
    hi = torch.minimum(a.hi.clamp(min=0), size)
    return _float_remainder(a, b, lo, hi) if dtype.is_float else integer(lo, hi, a.reach, dtype)


def _float_remainder(a: Interval, b: Interval, lo: Tensor, hi: Tensor) -> Interval:
    return _unknown_where(_has_zero(b) | _infinite(a) | _infinite(b), Interval(lo, hi))


def power(args: Args, dtype: DType) -> Interval:
    """Whole exponents that are one constant; otherwise positive float bases."""
    a, b = args
    exponent = single(b)
    if exponent is not None and 0 <= exponent <= 64 and exponent == int(exponent):
        base = absolute((a,), dtype) if exponent % 2 == 0 else a
        lo, hi = torch.pow(base.lo, int(exponent)), torch.pow(base.hi, int(exponent))
        if dtype.is_float:
            return widened(lo, hi, dtype, a)
        return integer(lo, hi, max(a.reach, 1) ** int(exponent), dtype)
    if not dtype.is_float:
        return unknown(dtype)
    lo, hi = corners(torch.pow, a, b)
    # Between the corners a power is monotone in each operand; 1 is passed where the exponent is 0.
    return _unknown_where(a.lo <= 0, widened(lo, hi, dtype, a, b))


def minimum(args: Args, dtype: DType) -> Interval:
    a, b = args
    lo, hi = torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi)
    return spread_nan(lo, hi, a, b) if dtype.is_float else Interval(lo, hi, max(a.reach, b.reach))


def maximum(args: Args, dtype: DType) -> Interval:
    a, b = args
    lo, hi = torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi)
    return spread_nan(lo, hi, a, b) if dtype.is_float else Interval(lo, hi, max(a.reach, b.reach))


def sign(args: Args, _: DType) -> Interval:
    return Interval(torch.sign(args[0].lo), torch.sign(args[0].hi), 1)  # torch.sign(NaN) is 0


def rounding(function: Callable[[Tensor], Tensor]) -> IntervalRule:
    """Monotone and exact; the identity on integers."""
    return lambda args, _: Interval(function(args[0].lo), function(args[0].hi), args[0].reach)


def copysign(args: Args, dtype: DType) -> Interval:
    size, b = absolute(args[:1], dtype), args[1]
    lo = torch.where(b.lo > 0, size.lo, -size.hi)
    hi = torch.where(b.hi < 0, -size.lo, size.hi)
    return spread_nan(lo, hi, args[0])


# Comparisons: (certainly true, possibly true), for operands that are not NaN.
_COMPARISONS: dict[str, Callable[[Interval, Interval], tuple[Tensor, Tensor]]] = {
    "lt": lambda a, b: (a.hi < b.lo, a.lo < b.hi),
    "le": lambda a, b: (a.hi <= b.lo, a.lo <= b.hi),
    "gt": lambda a, b: (a.lo > b.hi, a.hi > b.lo),
    "ge": lambda a, b: (a.lo >= b.hi, a.hi >= b.lo),
    "eq": lambda a, b: (
        (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo),
        (a.lo <= b.hi) & (b.lo <= a.hi),
    ),
}


def comparison(name: str) -> IntervalRule:
    """Any comparison with NaN is false, but `ne`, which is the negation of `eq`."""
    compare = _COMPARISONS["eq" if name == "ne" else name]

    def rule(args: Args, _: DType) -> Interval:
        a, b = args
        if a.lo.dtype is torch.bool:
            a, b = (Interval(x.lo.to(torch.int64), x.hi.to(torch.int64)) for x in args)
        true, possible = compare(a, b)
        if a.lo.dtype.is_floating_point:
            true = true & ~(maybe_nan(a) | maybe_nan(b))
        return Interval(~possible, ~true) if name == "ne" else Interval(true, possible)

    return rule


def conjunction(args: Args, dtype: DType) -> Interval:
    a, b = args
    if dtype is DType.BOOL:
        return Interval(a.lo & b.lo, a.hi & b.hi)
    mask = int(single(b) or 0)
    if 0 < mask < 2**32 and mask & (mask + 1) == 0:
        return mod((a, point(mask + 1, DType.I64)), dtype)
    # A natural number bounds the result, whatever the other operand is.
    hi = torch.where(b.lo < 0, a.hi, torch.where(a.lo < 0, b.hi, torch.minimum(a.hi, b.hi)))
    return _bits((a.lo >= 0) | (b.lo >= 0), torch.zeros_like(a.lo), hi, args, dtype)


def disjunction(args: Args, dtype: DType) -> Interval:
    a, b = args
    if dtype is DType.BOOL:
        return Interval(a.lo | b.lo, a.hi | b.hi)
    natural = (a.lo >= 0) & (b.lo >= 0)
    return _bits(natural, torch.maximum(a.lo, b.lo), a.hi + b.hi, args, dtype)


def exclusive(args: Args, dtype: DType) -> Interval:
    a, b = args
    if dtype is DType.BOOL:
        decided = (a.lo == a.hi) & (b.lo == b.hi)
        differs = a.lo ^ b.lo
        return Interval(decided & differs, ~decided | differs)
    natural = (a.lo >= 0) & (b.lo >= 0)
    return _bits(natural, torch.zeros_like(a.lo), a.hi + b.hi, args, dtype)


def _bits(natural: Tensor, lo: Tensor, hi: Tensor, args: Args, dtype: DType) -> Interval:
    """[lo, hi] where both operands are natural numbers, else all that as many bits can hold."""
    reach = 2 ** max(x.reach.bit_length() for x in args)
    if reach > 2**62:
        return unknown(dtype)
    lo, hi = (
        torch.where(natural, lo, -reach),
        torch.where(natural, hi.clamp(max=reach - 1), reach - 1),
    )
    return integer(lo, hi, reach, dtype)


def negation(args: Args, dtype: DType) -> Interval:
    (a,) = args
    if dtype is DType.U8:
        return Interval(255 - a.hi, 255 - a.lo, 255)
    return Interval(~a.hi, ~a.lo, a.reach + 1)


def shift_left(args: Args, dtype: DType) -> Interval:
    a, count = args[0], single(args[1])
    if count is None or not 0 <= count < 62:
        return unknown(dtype)
    return integer(a.lo << int(count), a.hi << int(count), a.reach << int(count), dtype)


def shift_right(args: Args, dtype: DType) -> Interval:
    a, count = args[0], single(args[1])
    if count is None:
        return unknown(dtype)
    bits = int(count) if 0 <= count < 63 else 63  # further, only the sign is left
    return Interval(a.lo >> bits, a.hi >> bits, a.reach)


def select(args: Args, dtype: DType) -> Interval:
    c, a, b = args
    if dtype is DType.BOOL:
        lo, hi = a.lo & b.lo, a.hi | b.hi
    else:
        lo, hi = torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi)
    lo = torch.where(c.lo, a.lo, torch.where(c.hi, lo, b.lo))
    hi = torch.where(c.lo, a.hi, torch.where(c.hi, hi, b.hi))
    return Interval(lo, hi, max(a.reach, b.reach))


def cast(args: Args, dtype: DType) -> Interval:
    (a,) = args
    if dtype is DType.BOOL:
        if a.lo.dtype is torch.bool:
            return a
        return Interval((a.lo > 0) | (a.hi < 0), (a.lo != 0) | (a.hi != 0))  # NaN is true
    if dtype.is_float:
        return outward(a.lo.double(), a.hi.double(), dtype, *_floats(a))
    if not a.lo.dtype.is_floating_point:
        reach = 1 if a.lo.dtype is torch.bool else a.reach
        return integer(a.lo.to(torch.int64), a.hi.to(torch.int64), reach, dtype)
    least, most = INT_LIMITS[dtype]
    fits = (a.lo > least - 1.0) & (a.hi < most + 1.0)
    fits = fits & (a.lo >= -(2.0**62)) & (a.hi <= 2.0**62)
    lo = torch.where(fits, a.lo, 0.0).trunc().to(torch.int64)
    hi = torch.where(fits, a.hi, 0.0).trunc().to(torch.int64)
    reach = max(-least, most)
    return Interval(torch.where(fits, lo, least), torch.where(fits, hi, most), reach)


def _floats(a: Interval) -> tuple[Interval, ...]:
    return (a,) if a.lo.dtype.is_floating_point else ()


def rising(
    f: Callable[[Tensor], Tensor], least: float = -math.inf, most: float = math.inf
) -> IntervalRule:
    """A function that never falls, with values in least .. most; NaN outside its domain."""

    def rule(args: Args, dtype: DType) -> Interval:
        (a,) = args
        wide = widened(f(a.lo), f(a.hi), dtype, a)
        open_ = maybe_nan(wide)
        lo = torch.where(open_, wide.lo, wide.lo.clamp(min=least))
        return Interval(lo, torch.where(open_, wide.hi, wide.hi.clamp(max=most)))

    return rule


def falling(f: Callable[[Tensor], Tensor], least: float, most: float) -> IntervalRule:
    """A function that never rises: a rising one of the negated operand."""
    rule = rising(lambda x: f(-x), least, most)
    return lambda args, dtype: rule((Interval(-args[0].hi, -args[0].lo),), dtype)


def rsqrt(args: Args, dtype: DType) -> Interval:
    """Falls, but jumps from inf to -inf between the zeros of both signs."""
    return _unknown_where(args[0].lo <= 0, falling(torch.rsqrt, 0.0, math.inf)(args, dtype))


def cosh(args: Args, dtype: DType) -> Interval:
    return rising(torch.cosh, 0.0)((absolute(args, dtype),), dtype)


def bounded(size: float) -> IntervalRule:
    """Within -size .. size for finite operands; NaN possible otherwise."""

    def rule(args: Args, _: DType) -> Interval:
        open_ = constant(False)
        for x in args:
            open_ = open_ | _infinite(x)
        hi = torch.where(open_, math.inf, constant(size, torch.float64))
        return Interval(-hi, hi)

    return rule


def anything(_: Args, dtype: DType) -> Interval:
    return unknown(dtype)


def isnan(args: Args, _: DType) -> Interval:
    possible = maybe_nan(args[0])
    return Interval(torch.zeros_like(possible), possible)


def isinf(args: Args, _: DType) -> Interval:
    # Never certain: an end beyond float32 may stand for a number that float64 holds.
    possible = _infinite(args[0])
    return Interval(torch.zeros_like(possible), possible)


def isfinite(args: Args, _: DType) -> Interval:
    certain = ~_infinite(args[0])
    return Interval(certain, torch.ones_like(certain))
