"""Functions that generated fragments call, where Triton's own operators differ from torch's or
lack one.

Integer division and remainder in Triton truncate; torch floors. A zero divisor gives zero: it can
only be met in lanes that a mask or a `where` discards.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.unpack import double, real, whole, whole32

__all__ = ["double", "real", "whole", "whole32"]  # for fragments, beside what follows

LOG2_E = tl.constexpr(1.4426950408889634)
# A score times log2(e), rounded, less than which another is subtracted in one multiply-add: from
# HUGE on exponents are off by an eighth, from FAR on by a half and, at 1e9, by 18.
HUGE = tl.constexpr(2.0**22)
FAR = tl.constexpr(2.0**24)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def small_to_float(x):
    """float32 of an integer within +-2**22, exact: its bits placed in the mantissa of 1.5 * 2**23.

    Two operations at full rate; the conversion instruction runs at a quarter of it or less."""
    placed = tl.cast(x, tl.int32) + 0x4B400000
    return tl.cast(placed, tl.float32, bitcast=True) - 12582912.0


@triton.jit
def truncdiv(a, b):
    safe = tl.where(b == 0, 1, b)
    return tl.where(b == 0, 0, a // safe)


@triton.jit
def floordiv(a, b):
    safe = tl.where(b == 0, 1, b)
    quotient = a // safe
    remainder = a - quotient * safe
    lower = (remainder != 0) & ((remainder < 0) != (safe < 0))
    return tl.where(b == 0, 0, tl.where(lower, quotient - 1, quotient))


@triton.jit
def mod(a, b):
    safe = tl.where(b == 0, 1, b)
    remainder = a - (a // safe) * safe
    wrap = (remainder != 0) & ((remainder < 0) != (safe < 0))
    return tl.where(b == 0, 0, tl.where(wrap, remainder + safe, remainder))


@triton.jit
def fmod_int(a, b):
    safe = tl.where(b == 0, 1, b)
    return tl.where(b == 0, 0, a - (a // safe) * safe)


@triton.jit
def fmod_float(a, b):
    return a - trunc(a / b) * b


@triton.jit
def mod_float(a, b):
    return a - tl.floor(a / b) * b


@triton.jit
def pow_int(a, b):
    """a ** b by repeated squaring; a negative exponent is torch's error and gives 0 or 1 here."""
    result = tl.where(b < 0, 0, 1) + a * 0
    base = a
    left = tl.where(b < 0, 0, b)
    for _ in tl.static_range(31):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    return result


@triton.jit
def shift_left(a, count, BITS: tl.constexpr):
    """a << count; all bits leave where the count is outside 0 .. BITS - 1."""
    inside = (count >= 0) & (count < BITS)
    return tl.where(inside, a << tl.where(inside, count, 0), 0)


@triton.jit
def shift_right(a, count, BITS: tl.constexpr):
    """a >> count, arithmetic for signed types; a count outside 0 .. BITS - 1 leaves the sign
    only."""
    inside = (count >= 0) & (count < BITS)
    return tl.where(inside, a >> tl.where(inside, count, 0), tl.where(a < 0, -1, 0))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    low = tl.floor(x)
    rest = x - low
    odd = (low * 0.5) != tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), low + 1.0, low)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def expm1(x):
    """exp(x) - 1 by its series where the difference would cancel."""
    series = x * (
        1 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * 0.0013888889))))
    )
    return tl.where(tl.abs(x) < 0.3, series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), corrected for the rounding of 1 + x (Goldberg 1991, theorem 4)."""
    y = 1.0 + x
    rest = y - 1.0
    return tl.where(rest == 0, x, tl.log(y) * (x / tl.where(rest == 0, 1.0, rest)))


@triton.jit
def tanh_exact(x):
    """tanh through expm1: error of a few units in the last place over the whole range."""
    size = tl.minimum(tl.abs(x), 20.0)
    e = expm1(-2.0 * size)
    result = -e / (2.0 + e)
    result = tl.where(x < 0, -result, result)
    return tl.where(x != x, x, result)


@triton.jit
def tanh_ptx(x):
    """tanh.approx.f32: one instruction, relative error below 2**-11 (PTX ISA, tanh)."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;",
        "=f,f",
        [x.to(tl.float32)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sinh(x):
    e = expm1(tl.abs(x))
    # e / (e + 1) is inf / inf for large x
    result = 0.5 * (e + tl.where(e < 1e30, e / (e + 1.0), 1.0))
    return tl.where(x < 0, -result, result)


@triton.jit
def cosh(x):
    return 0.5 * (tl.exp(x) + tl.exp(-x))


@triton.jit
def isfinite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def copysign(x, y):
    size = tl.abs(x)
    # 1 / y tells -0.0 from 0.0
    negative = (y < 0) | ((y == 0) & (1.0 / y < 0))
    return tl.where(negative, -size, size)


@triton.jit
def clamp_index(i, size):
    """A negative index counts from the end; what is still outside is clamped into the tensor."""
    wrapped = tl.where(i < 0, i + size, i)
    return tl.minimum(tl.maximum(wrapped, 0), tl.maximum(size - 1, 0))
