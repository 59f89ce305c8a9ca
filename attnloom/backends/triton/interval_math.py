"""Interval arithmetic in kernels: what ir/op_intervals.py is on tensors, for values in registers.

A value is a pair (lo, hi), ends included: int1 for BOOL ("certainly true", "possibly true"), int64
for integers, float64 for floats.

    integers    both ends lie within -WIDEST .. WIDEST, or the value is unknown: exactly that pair.
                A result that leaves its type, where the type would wrap, is unknown too.
    floats      ends are moved outward to float32 (float64) numbers, so that they hold however the
                mask rounds, fused multiply-adds included. (-inf, inf) is unknown, and the only pair
                that may be NaN.

Rules are sound, and tight for what joins two positions. Tiles that they leave open are evaluated
score by score, so that a loose rule costs time only.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import floordiv as floor_quotient

WIDEST = tl.constexpr(1 << 61)
_SAFE_PRODUCT = tl.constexpr(2.0**60)
_WHOLE_DOUBLES = tl.constexpr(2.0**53)
_TINY = tl.constexpr(2.0**-126)  # below it float32 is denormal and may be flushed to zero
_ULP32 = tl.constexpr(2.0**-23)
_ULP64 = tl.constexpr(2.0**-52)
_INF = tl.constexpr(float("inf"))


@triton.jit
def integer(lo, hi, bad, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The pair if it lies within LEAST .. MOST, else unknown. `bad`: unknown in any case."""
    out = (lo < LEAST) | (hi > MOST) | (lo <= -WIDEST) | (hi >= WIDEST) | bad
    return tl.where(out, -WIDEST, lo), tl.where(out, WIDEST, hi)


@triton.jit
def _open(lo, hi):
    return (lo <= -WIDEST) | (hi >= WIDEST)


@triton.jit
def add(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    return integer(a + b, u + v, _open(a, u) | _open(b, v), LEAST, MOST)


@triton.jit
def sub(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    return integer(a - v, u - b, _open(a, u) | _open(b, v), LEAST, MOST)


@triton.jit
def mul(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    size = tl.maximum(-a, u).to(tl.float32) * tl.maximum(-b, v).to(tl.float32)
    bad = (size > _SAFE_PRODUCT) | _open(a, u) | _open(b, v)
    b, v = tl.where(bad, 0, b), tl.where(bad, 0, v)
    w, x, y, z = a * b, a * v, u * b, u * v
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return integer(lo, hi, bad, LEAST, MOST)


@triton.jit
def neg(a, u, LEAST: tl.constexpr, MOST: tl.constexpr):
    return integer(-u, -a, _open(a, u), LEAST, MOST)


@triton.jit
def absolute(a, u, LEAST: tl.constexpr, MOST: tl.constexpr):
    lo, hi = tl.maximum(tl.maximum(a, -u), 0), tl.maximum(-a, u)
    return integer(lo, hi, _open(a, u), LEAST, MOST)


@triton.jit
def minimum(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    bad = _open(a, u) | _open(b, v)
    return integer(tl.minimum(a, b), tl.minimum(u, v), bad, LEAST, MOST)


@triton.jit
def maximum(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    bad = _open(a, u) | _open(b, v)
    return integer(tl.maximum(a, b), tl.maximum(u, v), bad, LEAST, MOST)


@triton.jit
def floordiv(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Unknown where the divisor may be zero."""
    bad = _open(a, u) | _open(b, v) | ((b <= 0) & (v >= 0))
    b, v = tl.where(bad, 1, b), tl.where(bad, 1, v)
    w, x = floor_quotient(a, b), floor_quotient(a, v)
    y, z = floor_quotient(u, b), floor_quotient(u, v)
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return integer(lo, hi, bad, LEAST, MOST)


@triton.jit
def truncdiv(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Unknown where the divisor may be zero."""
    bad = _open(a, u) | _open(b, v) | ((b <= 0) & (v >= 0))
    b, v = tl.where(bad, 1, b), tl.where(bad, 1, v)
    w, x, y, z = a // b, a // v, u // b, u // v
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return integer(lo, hi, bad, LEAST, MOST)


@triton.jit
def mod(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Between two multiples of a divisor that is one number the remainder is a line."""
    lo, hi = tl.minimum(b + 1, 0), tl.maximum(v - 1, 0)
    line = (b == v) & (b != 0) & (b != -1) & ~_open(a, u)
    divisor = tl.where(line, b, 1)
    first, last = floor_quotient(a, divisor), floor_quotient(u, divisor)
    line = line & (first == last)
    lo = tl.where(line, a - first * divisor, lo)
    hi = tl.where(line, u - last * divisor, hi)
    return integer(lo, hi, _open(b, v), LEAST, MOST)


@triton.jit
def bit_and(a, u, b, v, LEAST: tl.constexpr, MOST: tl.constexpr):
    """A natural number bounds the result, whatever the other operand is."""
    bad = ((a < 0) & (b < 0)) | _open(a, u) | _open(b, v)
    hi = tl.where(b < 0, u, tl.where(a < 0, v, tl.minimum(u, v)))
    return integer(hi * 0, hi, bad, LEAST, MOST)


@triton.jit
def shift_right(a, u, COUNT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    return integer(a >> COUNT, u >> COUNT, _open(a, u), LEAST, MOST)


@triton.jit
def select(c, d, a, u, b, v):
    """Either branch where the condition (c, d) is open; any type but BOOL."""
    lo = tl.where(c, a, tl.where(d, tl.minimum(a, b), b))
    hi = tl.where(c, u, tl.where(d, tl.maximum(u, v), v))
    return lo, hi


@triton.jit
def select_bool(c, d, a, u, b, v):
    lo = (c & a) | (~c & d & a & b) | (~c & ~d & b)
    hi = (c & u) | (~c & d & (u | v)) | (~c & ~d & v)
    return lo, hi


@triton.jit
def truth(a, u):
    """Of a number; NaN is true."""
    return (a > 0) | (u < 0), (a != 0) | (u != 0)


@triton.jit
def lt(a, u, b, v):
    return u < b, a < v


@triton.jit
def le(a, u, b, v):
    return u <= b, a <= v


@triton.jit
def eq(a, u, b, v):
    return (a == u) & (b == v) & (a == b), (a <= v) & (b <= u)


@triton.jit
def ne(a, u, b, v):
    return (u < b) | (v < a), (a != u) | (b != v) | (a != b)


@triton.jit
def _unknown(a, u):
    return (a == -_INF) & (u == _INF)


# Comparisons of floats, which NaN makes false, but `ne`, which it makes true.


@triton.jit
def flt(a, u, b, v):
    return (u < b) & ~_unknown(a, u) & ~_unknown(b, v), a < v


@triton.jit
def fle(a, u, b, v):
    return (u <= b) & ~_unknown(a, u) & ~_unknown(b, v), a <= v


@triton.jit
def feq(a, u, b, v):
    return (a == u) & (b == v) & (a == b), (a <= v) & (b <= u)


@triton.jit
def spread(lo, hi, bad):
    """A float pair, unknown where bad and where an end is NaN."""
    bad = (lo != lo) | (hi != hi) | bad
    return tl.where(bad, -_INF, lo), tl.where(bad, _INF, hi)


@triton.jit
def outward(lo, hi, bad, DOUBLE: tl.constexpr):
    """A float pair widened for rounding in its type."""
    if DOUBLE:
        lo = lo - tl.abs(lo) * _ULP64 - 1e-300
        hi = hi + tl.abs(hi) * _ULP64 + 1e-300
    else:
        low, high = lo.to(tl.float32).to(tl.float64), hi.to(tl.float32).to(tl.float64)
        lo = tl.where(low > lo, low - tl.abs(low) * _ULP32 - _TINY, low)
        hi = tl.where(high < hi, high + tl.abs(high) * _ULP32 + _TINY, high)
        lo = tl.where((lo > 0) & (lo < _TINY), 0.0, lo)
        hi = tl.where((hi < 0) & (hi > -_TINY), 0.0, hi)
    return spread(lo, hi, bad)


@triton.jit
def fadd(a, u, b, v, DOUBLE: tl.constexpr):
    return outward(a + b, u + v, _unknown(a, u) | _unknown(b, v), DOUBLE)


@triton.jit
def fsub(a, u, b, v, DOUBLE: tl.constexpr):
    return outward(a - v, u - b, _unknown(a, u) | _unknown(b, v), DOUBLE)


@triton.jit
def fmul(a, u, b, v, DOUBLE: tl.constexpr):
    w, x, y, z = a * b, a * v, u * b, u * v
    bad = (w != w) | (x != x) | (y != y) | (z != z) | _unknown(a, u) | _unknown(b, v)
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    return outward(lo, hi, bad, DOUBLE)


@triton.jit
def fdiv(a, u, b, v, DOUBLE: tl.constexpr):
    """Unknown where the divisor may be zero. Widened twice: float32 division may be approximate."""
    bad = ((b <= 0) & (v >= 0)) | _unknown(a, u)
    b, v = tl.where(bad, 1.0, b), tl.where(bad, 1.0, v)
    w, x, y, z = a / b, a / v, u / b, u / v
    bad = bad | (w != w) | (x != x) | (y != y) | (z != z)
    lo = tl.minimum(tl.minimum(w, x), tl.minimum(y, z))
    hi = tl.maximum(tl.maximum(w, x), tl.maximum(y, z))
    slack = 4 * (_ULP64 if DOUBLE else _ULP32)
    return outward(lo - tl.abs(lo) * slack, hi + tl.abs(hi) * slack, bad, DOUBLE)


@triton.jit
def fneg(a, u):
    return -u, -a


@triton.jit
def fabs(a, u):
    lo, hi = tl.maximum(tl.maximum(a, -u), 0.0), tl.maximum(-a, u)
    return spread(lo, hi, _unknown(a, u))


@triton.jit
def fmin(a, u, b, v):
    return spread(tl.minimum(a, b), tl.minimum(u, v), _unknown(a, u) | _unknown(b, v))


@triton.jit
def fmax(a, u, b, v):
    return spread(tl.maximum(a, b), tl.maximum(u, v), _unknown(a, u) | _unknown(b, v))


@triton.jit
def ffloor(a, u):
    return tl.floor(a), tl.floor(u)


@triton.jit
def fceil(a, u):
    return tl.ceil(a), tl.ceil(u)


@triton.jit
def int_to_float(a, u, DOUBLE: tl.constexpr):
    bad = _open(a, u)
    return outward(a.to(tl.float64), u.to(tl.float64), bad, DOUBLE)


@triton.jit
def float_to_int(a, u, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Unknown beyond what a float64 counts in ones."""
    bad = ~((a > -_WHOLE_DOUBLES) & (u < _WHOLE_DOUBLES))
    lo, hi = tl.where(bad, 0.0, a).to(tl.int64), tl.where(bad, 0.0, u).to(tl.int64)
    return integer(lo, hi, bad, LEAST, MOST)


# The table of one-sided parts: int64, rows 2 * i and 2 * i + 1 hold lo and hi of part i; floats as
# their float64 bits.


@triton.jit
def element(single, value):
    """An integer read from a captured tensor where its index is a single value."""
    value = value.to(tl.int64)
    return integer(tl.where(single, value, -WIDEST), value, ~single, -WIDEST, WIDEST)


@triton.jit
def element_bool(single, value):
    return single & value, ~single | value


@triton.jit
def element_float(single, value):
    value = value.to(tl.float64)
    return spread(value, value, ~single)


@triton.jit
def keep(table, i, step, at, positions, value, IS_FLOAT: tl.constexpr, SLACK: tl.constexpr):
    """Store the range of a part over a block. value: at `positions`, or one for all of them."""
    if IS_FLOAT:
        value = tl.where(positions >= 0, value, value).to(tl.float64)
        nan = value != value
        lo = tl.min(tl.where(nan, -_INF, value), 0)
        hi = tl.max(tl.where(nan, _INF, value), 0)
        if SLACK > 0:
            lo, hi = lo - tl.abs(lo) * SLACK, hi + tl.abs(hi) * SLACK
        lo, hi = lo.to(tl.int64, bitcast=True), hi.to(tl.int64, bitcast=True)
    else:
        value = tl.where(positions >= 0, value.to(tl.int64), value.to(tl.int64))
        lo, hi = tl.min(value, 0), tl.max(value, 0)
    tl.store(table + (2 * i) * step + at, lo)
    tl.store(table + (2 * i + 1) * step + at, hi)


@triton.jit
def kept_bool(table, i, step, at):
    return tl.load(table + 2 * i * step + at) != 0, tl.load(table + (2 * i + 1) * step + at) != 0


@triton.jit
def kept_int(table, i, step, at):
    lo, hi = tl.load(table + 2 * i * step + at), tl.load(table + (2 * i + 1) * step + at)
    return integer(lo, hi, lo != lo, -WIDEST, WIDEST)


@triton.jit
def kept_float(table, i, step, at):
    lo, hi = tl.load(table + 2 * i * step + at), tl.load(table + (2 * i + 1) * step + at)
    return lo.to(tl.float64, bitcast=True), hi.to(tl.float64, bitcast=True)
