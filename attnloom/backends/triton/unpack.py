"""Numbers out of packed tuples (packed.py), inside kernels.

A kernel reads some 90 of them. Triton's front end compiles a jit function once for each constant
that it is called with and hands the whole tuple over, which took half a second a kernel; as
builtins these write their few operations where they are called. The interpreter knows no builtins
but its own, and runs the same formulas as jit functions.
"""

import triton
import triton.language as tl
from triton.language import core

from attnloom.backends.triton.interpreter import INTERPRETED

_BASE = 1 << 24


def _whole(values, i, _semantic=None):
    """The integer that `packed.pack_int` put at values[i], values[i + 1] and values[i + 2]."""
    high, middle, low = (_part(values, i, n, tl.int64, _semantic) for n in range(3))
    return _shifted(_shifted(high, middle, _semantic), low, _semantic)


def _whole32(values, i, _semantic=None):
    """`whole` for a value known to fit 32 bits."""
    middle, low = (_part(values, i, n, tl.int32, _semantic) for n in (1, 2))
    return _shifted(middle, low, _semantic)


def _double(values, i, _semantic=None):
    """The float64 that `packed.pack_double` put at values[i], values[i + 1] and values[i + 2]."""
    first, second, third = (_part(values, i, n, tl.float64, _semantic) for n in range(3))
    both = core.add(first, second, _semantic=_semantic)
    return core.add(both, third, _semantic=_semantic)


def _real(values, i, ACC, _semantic=None):
    """A packed real number in the type of scores."""
    real = core._unwrap_if_constexpr(ACC)
    if real == tl.float64:
        return _double(values, i, _semantic)
    return _part(values, i, 0, real, _semantic)


def _part(values, i, n, dtype, _semantic):
    return core.cast(values[core._unwrap_if_constexpr(i) + n], dtype, _semantic=_semantic)


def _shifted(high, low, _semantic):
    return core.add(core.mul(high, _BASE, _semantic=_semantic), low, _semantic=_semantic)


@triton.jit
def _interpreted_whole(values, i):
    high = tl.cast(values[i], tl.int64) * 16777216 + tl.cast(values[i + 1], tl.int64)
    return high * 16777216 + tl.cast(values[i + 2], tl.int64)


@triton.jit
def _interpreted_whole32(values, i):
    return tl.cast(values[i + 1], tl.int32) * 16777216 + tl.cast(values[i + 2], tl.int32)


@triton.jit
def _interpreted_double(values, i):
    first = tl.cast(values[i], tl.float64) + tl.cast(values[i + 1], tl.float64)
    return first + tl.cast(values[i + 2], tl.float64)


@triton.jit
def _interpreted_real(values, i, ACC: tl.constexpr):
    if tl.float64 == ACC:
        return _interpreted_double(values, i)
    else:
        return tl.cast(values[i], ACC)


if INTERPRETED:
    whole, whole32 = _interpreted_whole, _interpreted_whole32
    double, real = _interpreted_double, _interpreted_real
else:
    whole, whole32 = core.builtin(_whole), core.builtin(_whole32)
    double, real = core.builtin(_double), core.builtin(_real)
