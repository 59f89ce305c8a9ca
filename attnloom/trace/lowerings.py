"""How torch functions that need more than an elementwise rule become IR.

A lowering takes the trace and the arguments of the call, and returns an Array, or a plain Python
value for questions about dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnloom.ir.builder import Builder
from attnloom.ir.node import DType
from attnloom.trace import elementwise as ew
from attnloom.trace import indexing
from attnloom.trace.context import Trace
from attnloom.trace.elementwise import Rule, apply, op, to_bool, to_dtype
from attnloom.trace.symbols import Array, NumberProxy

Lowering = Callable[..., Any]


def add(name: str, ir: str, swap: bool = False) -> Lowering:
    def lower(trace: Trace, x: Any, other: Any, *, alpha: Any = None) -> Array:
        if alpha is not None:
            dtype = trace.promote(trace.operand(x), trace.operand(other))
            factors = [to_dtype(trace, trace.operand(v), dtype) for v in (other, alpha)]
            other = ew.map_arrays(trace, op("mul"), factors)
        first, second = (other, x) if swap else (x, other)
        kind = "any" if ir == "add" else "same"
        return apply(trace, name, Rule(op(ir), kind), first, second)

    return lower


def divide(trace: Trace, x: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    rules = {
        None: Rule(op("div"), "real"),
        "floor": Rule(op("floordiv")),
        "trunc": Rule(op("truncdiv")),
    }
    rule = rules.get(rounding_mode)
    if rule is None:
        raise trace.error(
            f"divides with rounding_mode={rounding_mode!r}", "torch has None, 'floor' and 'trunc'."
        )
    return apply(trace, "torch.div", rule, x, other)


def power(trace: Trace, x: Any, exponent: Any) -> Array:
    """A Python exponent is part of the structure, so that small ones become multiplications."""
    if isinstance(exponent, torch.Tensor) or type(exponent) is Array:
        return apply(trace, "**", Rule(op("pow")), x, exponent)
    value = exponent.observe() if type(exponent) is NumberProxy else exponent
    operand = trace.operand(x)
    dtype = trace.promote(operand, value)
    if not dtype.is_float and value < 0:
        raise trace.error(
            f"raises an integer to the power {value}", "torch has no such result. Use floats."
        )
    rule = Rule(lambda b, node: _power(b, node, value))
    return apply(trace, "**", rule, to_dtype(trace, operand, dtype))


def _power(b: Builder, x: int, exponent: int | float) -> int:
    if not b.dtype(x).is_float and exponent == 0:
        return b.const(1, b.dtype(x))
    simple: dict[float, Callable[[], int]] = {
        1: lambda: x,
        2: lambda: ew.square(b, x),
        3: lambda: b.node("mul", ew.square(b, x), x),
        0.5: lambda: b.node("sqrt", x),
        -0.5: lambda: b.node("rsqrt", x),
        -1: lambda: b.node("reciprocal", x),
        -2: lambda: b.node("reciprocal", ew.square(b, x)),
    }
    made = simple.get(exponent)
    return made() if made else b.node("pow", x, b.const(exponent, b.dtype(x)))


def reflected_power(trace: Trace, exponent: Any, base: Any) -> Array:
    return apply(trace, "**", Rule(op("pow")), base, exponent)


def shift(name: str, swap: bool = False) -> Lowering:
    def lower(trace: Trace, x: Any, other: Any) -> Array:
        value, count = (other, x) if swap else (x, other)
        if not isinstance(count, torch.Tensor):
            plain = count.observe() if type(count) is NumberProxy else int(count)
            dtype = trace.promote(trace.operand(value), 1)
            fixed = Array.scalar(dtype, trace.builder.const(plain, dtype))
            return apply(trace, "a shift", Rule(op(name), "bits"), value, fixed)
        return apply(trace, "a shift", Rule(op(name), "bits"), value, count)

    return lower


def where(trace: Trace, condition: Any, x: Any, y: Any) -> Array:
    arms = ew.cast_operands(
        trace, "torch.where", Rule(ew.select, "any"), [trace.operand(x), trace.operand(y)]
    )
    return ew.map_arrays(trace, ew.select, [to_bool(trace, trace.operand(condition)), *arms])


def where_method(trace: Trace, x: Any, condition: Any, y: Any) -> Array:
    return where(trace, condition, x, y)


def masked_fill(trace: Trace, x: Any, mask: Any, value: Any) -> Array:
    base = trace.operand(x)
    filled = to_dtype(trace, trace.operand(value), trace.dtype_of(base))
    return where(trace, mask, filled, base)


def clamp(trace: Trace, x: Any, min: Any = None, max: Any = None) -> Array:  # noqa: A002
    if min is None and max is None:
        raise trace.error("calls clamp without bounds", "give min or max.")
    if max is None:
        return apply(trace, "clamp", Rule(ew.clamp_min), x, min)
    if min is None:
        return apply(trace, "clamp", Rule(ew.clamp_max), x, max)
    return apply(trace, "clamp", Rule(ew.clamp), x, min, max)


def hardtanh(trace: Trace, x: Any, min_val: Any = -1.0, max_val: Any = 1.0, **_: Any) -> Array:
    return clamp(trace, x, min_val, max_val)


def gelu(trace: Trace, x: Any, approximate: str = "none") -> Array:
    if approximate not in ("none", "tanh"):
        raise trace.error(
            f"calls gelu with approximate={approximate!r}", "torch has none and tanh."
        )
    emit = ew.gelu_tanh if approximate == "tanh" else ew.gelu
    return apply(trace, "gelu", Rule(emit, "real"), x)


def softplus(trace: Trace, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Array:
    return _with_numbers(trace, ew.softplus, x, beta, threshold)


def elu(trace: Trace, x: Any, alpha: Any = 1.0) -> Array:
    return _with_numbers(trace, ew.elu, x, alpha)


def leaky_relu(trace: Trace, x: Any, negative_slope: Any = 0.01) -> Array:
    return _with_numbers(trace, ew.leaky_relu, x, negative_slope)


def _with_numbers(trace: Trace, emit: ew.Emit, x: Any, *numbers: Any) -> Array:
    """A function of one tensor and numbers that never change its type."""
    base = ew.cast_operands(trace, "it", Rule(emit, "real"), [trace.operand(x)])[0]
    fixed = [to_dtype(trace, n, base.dtype) for n in numbers]
    return ew.map_arrays(trace, emit, [base, *fixed])


def lerp(trace: Trace, start: Any, end: Any, weight: Any) -> Array:
    return apply(trace, "lerp", Rule(ew.lerp, "real"), start, end, weight)


def addcmul(trace: Trace, x: Any, y: Any, z: Any, *, value: Any = 1) -> Array:
    return apply(trace, "addcmul", Rule(ew.addcmul), x, y, z, value)


def addcdiv(trace: Trace, x: Any, y: Any, z: Any, *, value: Any = 1) -> Array:
    return apply(trace, "addcdiv", Rule(ew.addcdiv, "real"), x, y, z, value)


def round_(trace: Trace, x: Any, *, decimals: int = 0) -> Array:
    if decimals:
        raise trace.error("rounds to decimals", "scale, round and scale back instead.")
    return apply(trace, "round", Rule(ew.rounding("round")), x)


def nan_to_num(
    trace: Trace, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Array:
    array = trace.operand(x)
    assert isinstance(array, Array)
    if not array.dtype.is_float:
        return array
    limits = torch.finfo(array.dtype.torch)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf

    def emit(b: Builder, v: int, if_nan: int, if_high: int, if_low: int) -> int:
        zero = ew.constant(b, v, 0)
        infinite = ew.select(b, b.node("gt", v, zero), if_high, if_low)
        finite = ew.select(b, b.node("isinf", v), infinite, v)
        return ew.select(b, b.node("isnan", v), if_nan, finite)

    return _with_numbers(trace, emit, array, nan, high, low)


# Types and copies


def _convert(trace: Trace, x: Any, dtype: torch.dtype) -> Array:
    try:
        target = DType.of(dtype)
    except KeyError:
        raise trace.error(
            f"converts to {dtype}", "kernels compute in bool, int8 to int64, float32, float64."
        ) from None
    value = trace.operand(x)
    return to_bool(trace, value) if target is DType.BOOL else to_dtype(trace, value, target)


def fixed_dtype(dtype: torch.dtype) -> Lowering:
    return lambda trace, x, **_: _convert(trace, x, dtype)


def convert_to(trace: Trace, x: Any, *args: Any, **kwargs: Any) -> Array:
    """Tensor.to and Tensor.type. Half types mean float32, in which kernels compute."""
    wanted = [*args, *(v for k, v in kwargs.items() if k in ("dtype", "device", "other"))]
    result = trace.operand(x)
    assert isinstance(result, Array)
    for value in wanted:
        if isinstance(value, torch.Tensor):
            return _convert(trace, result, value.dtype)
        if isinstance(value, torch.dtype):
            result = _convert(trace, result, value)
        elif isinstance(value, str | torch.device):
            device = torch.device(value)
            if device.type != trace.device.type:
                raise trace.error(
                    f"moves a traced value to {device}", f"it lives on {trace.device}."
                )
    return result


def same(trace: Trace, x: Any, **_: Any) -> Array:
    value = trace.operand(x)
    assert isinstance(value, Array)
    return value


def detach(trace: Trace, x: Any) -> Array:
    array = same(trace, x)
    zero = (trace.builder.const(0, DType.I64),) * len(array.dims)
    if trace.kind == "score_mod" and trace.carries_gradient(array.at(zero)):
        raise trace.error(
            "detaches a value that carries a gradient",
            "kernels differentiate the whole mod. Detach the captured tensor outside instead.",
        )
    return array


def filled(value: float | None) -> Lowering:
    def lower(
        trace: Trace, x: Any, *args: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> Array:
        target = DType.of(dtype) if dtype is not None else trace.operand(x).dtype  # type: ignore
        fill = args[0] if value is None else value
        if value is not None:
            return Array.scalar(target, trace.builder.const(value, target))
        return to_dtype(trace, trace.operand(fill), target)

    return lower


def new_filled(value: float | None) -> Lowering:
    """Tensor.new_zeros and its kin, of shape (), as torch's own and_masks writes them."""
    fill = filled(value)

    def lower(trace: Trace, x: Any, size: Any, *args: Any, **options: Any) -> Array:
        if len(size) if isinstance(size, tuple | list | torch.Size) else True:
            raise trace.error(
                f"makes a tensor of shape {size}",
                "a mod is evaluated one score at a time, so that new tensors have shape ().",
            )
        return fill(trace, x, *args, **options)

    return lower


def keep_scalar(trace: Trace, x: Any, *shape: Any, **_: Any) -> Array:
    """reshape, view, expand: scalars stay what they are."""
    array = same(trace, x)
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if array.dims or len(sizes):
        raise trace.error("reshapes a traced value", "shape captured tensors outside the mod.")
    return array


def permute(trace: Trace, x: Any, *order: Any) -> Array:
    array = same(trace, x)
    flat = order[0] if len(order) == 1 and isinstance(order[0], tuple | list) else order
    return indexing.permuted(array, [int(i) % len(array.dims) for i in flat])


# Questions


def size(trace: Trace, x: Any, dim: int | None = None) -> Any:
    shape = same(trace, x).shape
    trace.reads_sizes = trace.reads_sizes or bool(shape)
    return torch.Size(shape) if dim is None else shape[dim]


def numel(trace: Trace, x: Any) -> int:
    shape = size(trace, x)
    return shape.numel()


def length(trace: Trace, x: Any) -> int:
    shape = size(trace, x)
    if not shape:
        raise trace.error(
            "takes len() of a traced scalar", "only rows such as table[h] have a length."
        )
    return shape[0]


def truth(trace: Trace, x: Any) -> bool:
    array = same(trace, x)
    if array.dims:
        raise trace.error(
            f"asks for the truth of a vector {list(array.shape)}", "use .any() or .all() on it."
        )
    return trace.decide(to_bool(trace, array).at())
