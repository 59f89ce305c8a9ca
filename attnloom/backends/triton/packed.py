"""Run-time integers and doubles as three floats each.

Triton compiles a kernel anew for every integer of a tuple argument that is 1 or a multiple of 16
where the last one was not, and passes a Python float as float32. Three float32 hold an int64 or a
float64 exactly and are never specialised, so that lengths, strides and numbers do not recompile.
Their counterparts in kernels are `whole`, `whole32`, `double` and `real` of device_math.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

_BASE = 1 << 24  # integers below it are exact in float32


@functools.lru_cache(maxsize=4096)
def pack_int(value: int) -> tuple[float, float, float]:
    """(a, b, c) with value = (a * 2**24 + b) * 2**24 + c and 0 <= b, c < 2**24."""
    high, low = divmod(value, _BASE)
    top, middle = divmod(high, _BASE)
    return float(top), float(middle), float(low)


def pack_ints(values: Iterable[int]) -> tuple[float, ...]:
    return tuple(part for value in values for part in pack_int(value))


@functools.lru_cache(maxsize=4096)
def pack_double(value: float) -> tuple[float, float, float]:
    """Three float32 whose sum in float64 is the value, as far as float32's range allows."""
    with np.errstate(over="ignore"):
        first = float(np.float32(value))
    if not np.isfinite(first):
        return first, 0.0, 0.0
    second = float(np.float32(value - first))
    return first, second, value - first - second
