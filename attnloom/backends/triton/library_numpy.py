"""library.py for Triton's interpreter, which has no device library: the same functions by numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def _by_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        tensors = [t for t in operands if isinstance(t, tl.core.tensor)]  # others are literals
        widest = max(tensors, key=lambda t: len(t.type.shape) if t.type.is_block() else 0)
        values = [t.handle.data if isinstance(t, tl.core.tensor) else t for t in operands]
        result = np.asarray(function(*values)).astype(widest.handle.data.dtype)
        return tl.core.tensor(TensorHandle(result, widest.type.scalar), widest.type)

    return call


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


tan = _by_numpy(np.tan)
asin = _by_numpy(np.arcsin)
acos = _by_numpy(np.arccos)
atan = _by_numpy(np.arctan)
atan2 = _by_numpy(np.arctan2)
asinh = _by_numpy(np.arcsinh)
acosh = _by_numpy(np.arccosh)
atanh = _by_numpy(np.arctanh)
erf = _by_numpy(_erf)
erfc = _by_numpy(lambda x: 1.0 - _erf(x))
power = _by_numpy(np.power)
exp = _by_numpy(np.exp)
exp2 = _by_numpy(np.exp2)
expm1 = _by_numpy(np.expm1)
log = _by_numpy(np.log)
log2 = _by_numpy(np.log2)
log1p = _by_numpy(np.log1p)
tanh = _by_numpy(np.tanh)
sinh = _by_numpy(np.sinh)
cosh = _by_numpy(np.cosh)
sqrt = _by_numpy(np.sqrt)
