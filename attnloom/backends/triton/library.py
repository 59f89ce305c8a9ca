"""The device library's functions as jit functions, by which generated fragments call them.

Triton replaces `libdevice` by the library of the device it compiles for where a jit function names
it. library_numpy.py has the same names for Triton's interpreter.
"""

import triton
from triton.language.extra import libdevice


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def atan2(y, x):
    return libdevice.atan2(y, x)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def power(x, y):
    return libdevice.pow(x, y)


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log2(x):
    return libdevice.log2(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def sqrt(x):
    return libdevice.sqrt(x)
