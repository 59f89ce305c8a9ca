"""Elementwise torch functions: how operands promote, and the IR that each one becomes.

Where an IR operation and the torch function differ in a gradient at a kink (relu, clamp), the form
below is the one whose gradient is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnloom.ir.builder import Builder
from attnloom.ir.node import DType
from attnloom.trace.context import Trace
from attnloom.trace.messages import operator
from attnloom.trace.symbols import Array, Dim, Index, NumberProxy

Emit = Callable[..., int]
Operand = Array | NumberProxy | int | float
LN_2 = math.log(2.0)
_SQRT_HALF = math.sqrt(0.5)
_GELU_TANH = math.sqrt(2.0 / math.pi)
_BITWISE_OF_BOOL = {"add": "or", "mul": "and", "max": "or", "min": "and"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One elementwise function.

    emit: (builder, *operand nodes) -> node; operands have been cast to one type.
    kind: what that type is.
        same: what torch promotes the operands to; a number type
        bits: the same, BOOL and integers only
        any:  the same, of whatever type
        real: the same, or the default float type where it is no float
        bool: BOOL
    """

    emit: Emit
    kind: str = "same"


def apply(trace: Trace, name: str, rule: Rule, *values: Any) -> Array:
    """Promote, broadcast and emit; `name` is for messages."""
    operands = [trace.operand(v) for v in values]
    return map_arrays(trace, rule.emit, cast_operands(trace, name, rule, operands))


def cast_operands(trace: Trace, name: str, rule: Rule, operands: list[Operand]) -> list[Array]:
    if rule.kind == "bool":
        return [to_bool(trace, o) for o in operands]
    dtype = trace.promote(*operands)
    if rule.kind == "real" and not dtype.is_float:
        dtype = trace.default_float
    if rule.kind == "same" and dtype is DType.BOOL:
        raise trace.error(
            f"calls {operator(name)} on a bool",
            "kernels do arithmetic on numbers. Cast with .int() first.",
        )
    if rule.kind == "bits" and dtype.is_float:
        raise trace.error(
            f"calls {operator(name)} on a float", "bits exist in integers and bools. Cast first."
        )
    return [to_dtype(trace, o, dtype) for o in operands]


def to_dtype(trace: Trace, value: Operand, dtype: DType) -> Array:
    """`value` as an array of `dtype`, by torch's conversion."""
    builder = trace.builder
    if not isinstance(value, Array):
        return Array.scalar(dtype, trace.number(value, dtype))
    if value.dtype is dtype:
        return value
    return Array(dtype, value.dims, lambda index: builder.cast(value.at(index), dtype))


def to_bool(trace: Trace, value: Operand) -> Array:
    """`value != 0`."""
    builder = trace.builder
    if isinstance(value, Array):
        if value.dtype is DType.BOOL:
            return value
        return Array(DType.BOOL, value.dims, lambda index: _nonzero(builder, value.at(index)))
    if isinstance(value, bool):
        return Array.scalar(DType.BOOL, builder.const(value, DType.BOOL))
    number = trace.number(value, trace.dtype_of(value))
    return Array.scalar(DType.BOOL, _nonzero(builder, number))


def _nonzero(b: Builder, x: int) -> int:
    return b.node("ne", x, b.const(0, b.dtype(x)))


def map_arrays(trace: Trace, emit: Emit, arrays: list[Array]) -> Array:
    """`emit` on every element of arrays that broadcast."""
    builder = trace.builder
    dims = broadcast(trace, arrays)
    if not dims:
        node = emit(builder, *(a.at() for a in arrays))
        return Array.scalar(builder.dtype(node), node)

    def at(index: Index) -> int:
        return emit(builder, *(a.at(_inner(builder, a, index)) for a in arrays))

    # The element at 0 tells the type; as a dead node it is dropped later.
    zero = (builder.const(0, DType.I64),) * len(dims)
    return Array(builder.dtype(at(zero)), dims, at)


def _inner(builder: Builder, array: Array, index: Index) -> Index:
    """The part of a broadcast index that `array` has."""
    own = index[len(index) - len(array.dims) :]
    zero = builder.const(0, DType.I64)
    return tuple(zero if d.length == 1 else i for d, i in zip(array.dims, own, strict=True))


def broadcast(trace: Trace, arrays: list[Array]) -> tuple[Dim, ...]:
    """Dimensions of the joint shape; vectors must agree in length or have length 1."""
    rank = max(len(a.dims) for a in arrays)
    joint: list[Dim] = []
    for place in range(-rank, 0):
        found = [a.dims[place] for a in arrays if len(a.dims) >= -place]
        longest = max(found, key=lambda d: d.length)
        if any(d.length not in (1, longest.length) for d in found):
            shapes = " and ".join(str(list(a.shape)) for a in arrays if a.dims)
            raise trace.error(f"combines vectors of shapes {shapes}", "their lengths must agree.")
        joint.append(longest)
    if rank:
        trace.reads_sizes = True
    return tuple(joint)


def op(name: str) -> Emit:
    """An IR operation as it is."""
    bool_form = _BITWISE_OF_BOOL.get(name)

    def emit(b: Builder, *nodes: int) -> int:
        use_bits = bool_form is not None and b.dtype(nodes[0]) is DType.BOOL
        return b.node(bool_form if use_bits and bool_form else name, *nodes)

    return emit


def rounding(name: str) -> Emit:
    """An operation that leaves integers as they are."""
    return lambda b, x: b.node(name, x) if b.dtype(x).is_float else x


def select(b: Builder, condition: int, yes: int, no: int) -> int:
    return b.node("where", condition, yes, no)


def logical_not(b: Builder, x: int) -> int:
    node = b.nodes[x]
    return node.args[0] if node.op == "not" and node.dtype is DType.BOOL else b.node("not", x)


def constant(b: Builder, like: int, value: float) -> int:
    return b.const(value, b.dtype(like))


def square(b: Builder, x: int) -> int:
    return b.node("mul", x, x)


def relu(b: Builder, x: int) -> int:
    zero = constant(b, x, 0)
    return select(b, b.node("le", x, zero), zero, x)


def clamp_min(b: Builder, x: int, low: int) -> int:
    if not b.dtype(x).is_float:
        return b.node("max", x, low)
    return select(b, b.node("lt", x, low), low, x)


def clamp_max(b: Builder, x: int, high: int) -> int:
    if not b.dtype(x).is_float:
        return b.node("min", x, high)
    return select(b, b.node("gt", x, high), high, x)


def clamp(b: Builder, x: int, low: int, high: int) -> int:
    return clamp_max(b, clamp_min(b, x, low), high)


def softplus(b: Builder, x: int, beta: int, threshold: int) -> int:
    scaled = b.node("mul", x, beta)
    soft = b.node("div", b.node("log1p", b.node("exp", scaled)), beta)
    return select(b, b.node("gt", scaled, threshold), x, soft)


def silu(b: Builder, x: int) -> int:
    return b.node("mul", x, b.node("sigmoid", x))


def mish(b: Builder, x: int) -> int:
    soft = softplus(b, x, constant(b, x, 1), constant(b, x, 20))
    return b.node("mul", x, b.node("tanh", soft))


def gelu(b: Builder, x: int) -> int:
    erf = b.node("erf", b.node("mul", x, constant(b, x, _SQRT_HALF)))
    return _half_gate(b, x, erf)


def gelu_tanh(b: Builder, x: int) -> int:
    cube = b.node("mul", square(b, x), x)
    inner = b.node("add", x, b.node("mul", constant(b, x, 0.044715), cube))
    return _half_gate(b, x, b.node("tanh", b.node("mul", constant(b, x, _GELU_TANH), inner)))


def _half_gate(b: Builder, x: int, gate: int) -> int:
    half = b.node("mul", x, constant(b, x, 0.5))
    return b.node("mul", half, b.node("add", gate, constant(b, x, 1)))


def log_sigmoid(b: Builder, x: int) -> int:
    tail = b.node("log1p", b.node("exp", b.node("neg", b.node("abs", x))))
    return b.node("sub", b.node("min", x, constant(b, x, 0)), tail)


def elu(b: Builder, x: int, alpha: int) -> int:
    low = b.node("mul", alpha, b.node("expm1", x))
    return select(b, b.node("gt", x, constant(b, x, 0)), x, low)


def leaky_relu(b: Builder, x: int, slope: int) -> int:
    return select(b, b.node("gt", x, constant(b, x, 0)), x, b.node("mul", x, slope))


def softsign(b: Builder, x: int) -> int:
    return b.node("div", x, b.node("add", b.node("abs", x), constant(b, x, 1)))


def hypot(b: Builder, x: int, y: int) -> int:
    return b.node("sqrt", b.node("add", square(b, x), square(b, y)))


def logaddexp(b: Builder, x: int, y: int) -> int:
    gap = b.node("neg", b.node("abs", b.node("sub", x, y)))
    apart = b.node("add", b.node("max", x, y), b.node("log1p", b.node("exp", gap)))
    mean = b.node("mul", b.node("add", x, y), constant(b, x, 0.5))
    # Equal infinities would meet inf - inf in `gap`.
    equal = b.node("add", mean, constant(b, x, LN_2))
    return select(b, b.node("eq", x, y), equal, apart)


def lerp(b: Builder, start: int, end: int, weight: int) -> int:
    return b.node("add", start, b.node("mul", weight, b.node("sub", end, start)))


def xlogy(b: Builder, x: int, y: int) -> int:
    zero = constant(b, x, 0)
    return select(b, b.node("eq", x, zero), zero, b.node("mul", x, b.node("log", y)))


def log10(b: Builder, x: int) -> int:
    return b.node("mul", b.node("log", x), constant(b, x, 1.0 / math.log(10.0)))


def frac(b: Builder, x: int) -> int:
    return b.node("sub", x, b.node("trunc", x))


def logit(b: Builder, x: int) -> int:
    return b.node("log", b.node("div", x, b.node("sub", constant(b, x, 1), x)))


def addcmul(b: Builder, x: int, y: int, z: int, value: int) -> int:
    return b.node("add", x, b.node("mul", value, b.node("mul", y, z)))


def addcdiv(b: Builder, x: int, y: int, z: int, value: int) -> int:
    return b.node("add", x, b.node("mul", value, b.node("div", y, z)))


def classify(name: str) -> Emit:
    """isnan and its kin, which integers answer without a look."""
    integers = {"isnan": False, "isinf": False, "isfinite": True}[name]
    return lambda b, x: b.node(name, x) if b.dtype(x).is_float else b.const(integers, DType.BOOL)
