"""Every torch function that a mod may call, in one table: function name -> lowering.

The name is that of the function or method, so `torch.exp(x)`, `x.exp()` and `torch.special.exp2(x)`
share an entry with their aliases. Properties carry the prefix `get:`. A lowering takes the trace
and the call's arguments and returns an Array, or a plain Python value for questions about dtype and
shape. What is not here is a TraceError; `messages.py` says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnloom.ir.node import DType
from attnloom.trace import elementwise as ew
from attnloom.trace import indexing, reductions
from attnloom.trace.context import Trace
from attnloom.trace.elementwise import Rule, apply, op, to_bool, to_dtype
from attnloom.trace.symbols import Array, NumberProxy

Lowering = Callable[..., Any]


def _unary(name: str, rule: Rule) -> Lowering:
    return lambda trace, x: apply(trace, name, rule, x)


def _binary(name: str, rule: Rule) -> Lowering:
    return lambda trace, x, other: apply(trace, name, rule, x, other)


def _reflected(name: str, rule: Rule) -> Lowering:
    return lambda trace, x, other: apply(trace, name, rule, other, x)


# IR operation and how operands promote -> the torch names of it.
_UNARY: dict[tuple[str, str], str] = {
    ("neg", "same"): "neg negative __neg__",
    ("abs", "same"): "abs absolute __abs__ fabs",
    ("sign", "same"): "sign sgn",
    ("exp", "real"): "exp",
    ("exp2", "real"): "exp2 special_exp2",
    ("expm1", "real"): "expm1 special_expm1",
    ("log", "real"): "log",
    ("log2", "real"): "log2",
    ("log1p", "real"): "log1p special_log1p",
    ("sqrt", "real"): "sqrt",
    ("rsqrt", "real"): "rsqrt",
    ("sin", "real"): "sin",
    ("cos", "real"): "cos",
    ("tan", "real"): "tan",
    ("asin", "real"): "asin arcsin",
    ("acos", "real"): "acos arccos",
    ("atan", "real"): "atan arctan",
    ("sinh", "real"): "sinh",
    ("cosh", "real"): "cosh",
    ("tanh", "real"): "tanh tanh_activation",
    ("asinh", "real"): "asinh arcsinh",
    ("acosh", "real"): "acosh arccosh",
    ("atanh", "real"): "atanh arctanh",
    ("sigmoid", "real"): "sigmoid special_expit expit",
    ("erf", "real"): "erf special_erf",
    ("erfc", "real"): "erfc special_erfc",
    ("reciprocal", "real"): "reciprocal",
    ("not", "bits"): "__invert__ bitwise_not",
}
_BINARY: dict[tuple[str, str], str] = {
    ("mul", "any"): "mul multiply __mul__ __rmul__",
    ("floordiv", "same"): "floor_divide __floordiv__",
    ("mod", "same"): "remainder __mod__",
    ("fmod", "same"): "fmod",
    ("max", "any"): "maximum",
    ("min", "any"): "minimum",
    ("eq", "any"): "eq __eq__",
    ("ne", "any"): "ne not_equal __ne__",
    ("lt", "any"): "lt less __lt__",
    ("le", "any"): "le less_equal __le__",
    ("gt", "any"): "gt greater __gt__",
    ("ge", "any"): "ge greater_equal __ge__",
    ("and", "bits"): "__and__ __rand__ bitwise_and",
    ("or", "bits"): "__or__ __ror__ bitwise_or",
    ("xor", "bits"): "__xor__ __rxor__ bitwise_xor",
    ("and", "bool"): "logical_and",
    ("or", "bool"): "logical_or",
    ("xor", "bool"): "logical_xor",
    ("atan2", "real"): "atan2 arctan2",
    ("copysign", "real"): "copysign",
}
_REFLECTED: dict[tuple[str, str], str] = {
    ("div", "real"): "__rdiv__ __rtruediv__",
    ("floordiv", "same"): "__rfloordiv__",
    ("mod", "same"): "__rmod__",
}
# Functions that are a composition of IR operations.
_COMPOSED: dict[str, Rule] = {
    "square": Rule(ew.square),
    "silu": Rule(ew.silu, "real"),
    "mish": Rule(ew.mish, "real"),
    "logsigmoid": Rule(ew.log_sigmoid, "real"),
    "log_sigmoid": Rule(ew.log_sigmoid, "real"),
    "softsign": Rule(ew.softsign, "real"),
    "log10": Rule(ew.log10, "real"),
    "frac": Rule(ew.frac),
    "logit": Rule(ew.logit, "real"),
    "special_logit": Rule(ew.logit, "real"),
    "isnan": Rule(ew.classify("isnan"), "any"),
    "isinf": Rule(ew.classify("isinf"), "any"),
    "isfinite": Rule(ew.classify("isfinite"), "any"),
    "floor": Rule(ew.rounding("floor")),
    "ceil": Rule(ew.rounding("ceil")),
    "trunc": Rule(ew.rounding("trunc")),
    "fix": Rule(ew.rounding("trunc")),
    "logical_not": Rule(ew.logical_not, "bool"),
}
_COMPOSED_BINARY: dict[str, Rule] = {
    "hypot": Rule(ew.hypot, "real"),
    "logaddexp": Rule(ew.logaddexp, "real"),
    "xlogy": Rule(ew.xlogy, "real"),
    "special_xlogy": Rule(ew.xlogy, "real"),
}


def _add(name: str, ir: str, swap: bool = False) -> Lowering:
    def lower(trace: Trace, x: Any, other: Any, *, alpha: Any = None) -> Array:
        if alpha is not None:
            other = apply(trace, name, Rule(op("mul"), "any"), other, alpha)
        first, second = (other, x) if swap else (x, other)
        kind = "any" if ir == "add" else "same"
        return apply(trace, name, Rule(op(ir), kind), first, second)

    return lower


def _div(trace: Trace, x: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    rule = {
        None: Rule(op("div"), "real"),
        "floor": Rule(op("floordiv")),
        "trunc": Rule(op("truncdiv")),
    }[rounding_mode]
    return apply(trace, "torch.div", rule, x, other)


def _pow(trace: Trace, x: Any, exponent: Any) -> Array:
    """A Python exponent is part of the structure, so that small ones become multiplications."""
    if isinstance(exponent, torch.Tensor) or type(exponent) is Array:
        return apply(trace, "**", Rule(op("pow")), x, exponent)
    value = exponent.observe() if type(exponent) is NumberProxy else exponent
    operand = trace.operand(x)
    dtype = trace.promote(operand, value)
    if not dtype.is_float and value < 0:
        trace.fail(
            f"raises an integer to the power {value}", "torch has no such result. Use floats."
        )
    base = to_dtype(trace, operand, DType.I64 if dtype is DType.BOOL else dtype)

    def emit(b: Any, node: int) -> int:
        return _power(b, node, value)

    return ew.map_arrays(trace, emit, [base])


def _power(b: Any, x: int, exponent: int | float) -> int:
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


def _rpow(trace: Trace, exponent: Any, base: Any) -> Array:
    return apply(trace, "**", Rule(op("pow")), base, exponent)


def _shift(name: str, swap: bool = False) -> Lowering:
    def lower(trace: Trace, x: Any, other: Any) -> Array:
        value, count = (other, x) if swap else (x, other)
        if not isinstance(count, torch.Tensor):
            plain = count.observe() if type(count) is NumberProxy else int(count)
            dtype = trace.promote(trace.operand(value), 1)
            fixed = Array.scalar(dtype, trace.builder.const(plain, dtype))
            return apply(trace, "a shift", Rule(op(name), "bits"), value, fixed)
        return apply(trace, "a shift", Rule(op(name), "bits"), value, count)

    return lower


def _where(trace: Trace, condition: Any, x: Any, y: Any) -> Array:
    arms = ew.cast_operands(
        trace, "torch.where", Rule(ew.select, "any"), [trace.operand(x), trace.operand(y)]
    )
    return ew.map_arrays(trace, ew.select, [to_bool(trace, trace.operand(condition)), *arms])


def _where_method(trace: Trace, x: Any, condition: Any, y: Any) -> Array:
    return _where(trace, condition, x, y)


def _masked_fill(trace: Trace, x: Any, mask: Any, value: Any) -> Array:
    base = trace.operand(x)
    filled = to_dtype(trace, trace.operand(value), trace.dtype_of(base))
    return _where(trace, mask, filled, base)


def _clamp(trace: Trace, x: Any, min: Any = None, max: Any = None) -> Array:  # noqa: A002
    if min is None and max is None:
        trace.fail("calls clamp without bounds", "give min or max.")
    if max is None:
        return apply(trace, "clamp", Rule(ew.clamp_min), x, min)
    if min is None:
        return apply(trace, "clamp", Rule(ew.clamp_max), x, max)
    return apply(trace, "clamp", Rule(ew.clamp), x, min, max)


def _hardtanh(trace: Trace, x: Any, min_val: Any = -1.0, max_val: Any = 1.0, **_: Any) -> Array:
    return _clamp(trace, x, min_val, max_val)


def _relu(trace: Trace, x: Any, inplace: bool = False) -> Array:
    if inplace:
        trace.fail("calls relu in place", "a traced value cannot be changed. Use relu(x).")
    return apply(trace, "relu", Rule(ew.relu), x)


def _silu(trace: Trace, x: Any, inplace: bool = False) -> Array:
    if inplace:
        trace.fail("calls silu in place", "a traced value cannot be changed. Use silu(x).")
    return apply(trace, "silu", Rule(ew.silu, "real"), x)


def _gelu(trace: Trace, x: Any, approximate: str = "none") -> Array:
    emit = ew.gelu_tanh if approximate == "tanh" else ew.gelu
    return apply(trace, "gelu", Rule(emit, "real"), x)


def _softplus(trace: Trace, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Array:
    return _with_numbers(trace, ew.softplus, x, beta, threshold)


def _elu(trace: Trace, x: Any, alpha: Any = 1.0, inplace: bool = False) -> Array:
    return _with_numbers(trace, ew.elu, x, alpha)


def _leaky_relu(trace: Trace, x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Array:
    return _with_numbers(trace, ew.leaky_relu, x, negative_slope)


def _with_numbers(trace: Trace, emit: ew.Emit, x: Any, *numbers: Any) -> Array:
    """A function of one tensor and numbers that never change its type."""
    base = ew.cast_operands(trace, "it", Rule(emit, "real"), [trace.operand(x)])[0]
    fixed = [to_dtype(trace, n, base.dtype) for n in numbers]
    return ew.map_arrays(trace, emit, [base, *fixed])


def _lerp(trace: Trace, start: Any, end: Any, weight: Any) -> Array:
    return apply(trace, "lerp", Rule(ew.lerp, "real"), start, end, weight)


def _addcmul(trace: Trace, x: Any, y: Any, z: Any, *, value: Any = 1) -> Array:
    return apply(trace, "addcmul", Rule(ew.addcmul), x, y, z, value)


def _addcdiv(trace: Trace, x: Any, y: Any, z: Any, *, value: Any = 1) -> Array:
    return apply(trace, "addcdiv", Rule(ew.addcdiv, "real"), x, y, z, value)


def _round(trace: Trace, x: Any, *, decimals: int = 0) -> Array:
    if decimals:
        trace.fail("rounds to decimals", "scale, round and scale back instead.")
    return apply(trace, "round", Rule(ew.rounding("round")), x)


def _nan_to_num(
    trace: Trace, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Array:
    array = trace.operand(x)
    assert isinstance(array, Array)
    if not array.dtype.is_float:
        return array
    limits = torch.finfo(array.dtype.torch)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf

    def emit(b: Any, v: int, if_nan: int, if_high: int, if_low: int) -> int:
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
        trace.fail(
            f"converts to {dtype}", "kernels compute in bool, int8 to int64, float32, float64."
        )
    value = trace.operand(x)
    return to_bool(trace, value) if target is DType.BOOL else to_dtype(trace, value, target)


def _to_fixed(dtype: torch.dtype) -> Lowering:
    return lambda trace, x, **_: _convert(trace, x, dtype)


def _to(trace: Trace, x: Any, *args: Any, **kwargs: Any) -> Array:
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
                trace.fail(f"moves a traced value to {device}", f"it lives on {trace.device}.")
    return result


def _same(trace: Trace, x: Any, **_: Any) -> Array:
    value = trace.operand(x)
    assert isinstance(value, Array)
    return value


def _detach(trace: Trace, x: Any) -> Array:
    array = _same(trace, x)
    zero = (trace.builder.const(0, DType.I64),) * len(array.dims)
    if trace.kind == "score_mod" and trace.carries_gradient(array.at(zero)):
        trace.fail(
            "detaches a value that carries a gradient",
            "kernels differentiate the whole mod. Detach the captured tensor outside instead.",
        )
    return array


def _filled(value: float | None) -> Lowering:
    def lower(
        trace: Trace, x: Any, *args: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> Array:
        target = DType.of(dtype) if dtype is not None else trace.operand(x).dtype  # type: ignore
        fill = args[0] if value is None else value
        if value is not None:
            return Array.scalar(target, trace.builder.const(value, target))
        return to_dtype(trace, trace.operand(fill), target)

    return lower


def _scalar_shape(trace: Trace, x: Any, *shape: Any, **_: Any) -> Array:
    """reshape, view, expand: scalars stay what they are."""
    array = _same(trace, x)
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if array.dims or len(sizes):
        trace.fail("reshapes a traced value", "shape captured tensors outside the mod.")
    return array


def _permute(trace: Trace, x: Any, *order: Any) -> Array:
    array = _same(trace, x)
    flat = order[0] if len(order) == 1 and isinstance(order[0], tuple | list) else order
    return indexing.permuted(array, [int(i) % len(array.dims) for i in flat])


# Questions


def _size(trace: Trace, x: Any, dim: int | None = None) -> Any:
    shape = _same(trace, x).shape
    trace.reads_sizes = trace.reads_sizes or bool(shape)
    return torch.Size(shape) if dim is None else shape[dim]


def _numel(trace: Trace, x: Any) -> int:
    shape = _size(trace, x)
    return shape.numel()


def _len(trace: Trace, x: Any) -> int:
    shape = _size(trace, x)
    if not shape:
        trace.fail("takes len() of a traced scalar", "only rows such as table[h] have a length.")
    return shape[0]


def _bool(trace: Trace, x: Any) -> bool:
    array = _same(trace, x)
    if array.dims:
        trace.fail(
            f"asks for the truth of a vector {list(array.shape)}", "use .any() or .all() on it."
        )
    return trace.decide(to_bool(trace, array).at())


def _build_table() -> dict[str, Lowering]:
    table: dict[str, Lowering] = {}
    for source, make in ((_UNARY, _unary), (_BINARY, _binary), (_REFLECTED, _reflected)):
        for (ir, kind), names in source.items():
            table |= {name: make(name, Rule(op(ir), kind)) for name in names.split()}
    table |= {name: _unary(name, rule) for name, rule in _COMPOSED.items()}
    table |= {name: _binary(name, rule) for name, rule in _COMPOSED_BINARY.items()}
    for names, lowering in _DIRECT.items():
        table |= dict.fromkeys(names.split(), lowering)
    return table


_DIRECT: dict[str, Lowering] = {
    "add __add__ __radd__": _add("+", "add"),
    "sub subtract __sub__": _add("-", "sub"),
    "rsub __rsub__": _add("-", "sub", swap=True),
    "div divide true_divide __truediv__ __div__": _div,
    "pow __pow__": _pow,
    "__rpow__": _rpow,
    "__lshift__ bitwise_left_shift": _shift("shl"),
    "__rshift__ bitwise_right_shift": _shift("shr"),
    "__rlshift__": _shift("shl", swap=True),
    "__rrshift__": _shift("shr", swap=True),
    "where": _where,
    "where_method": _where_method,
    "masked_fill": _masked_fill,
    "clamp clip": _clamp,
    "clamp_min": lambda trace, x, min: _clamp(trace, x, min=min),  # noqa: A006
    "clamp_max": lambda trace, x, max: _clamp(trace, x, max=max),  # noqa: A006
    "hardtanh": _hardtanh,
    "relu": _relu,
    "silu": _silu,
    "relu6": lambda trace, x, inplace=False: _clamp(trace, x, 0.0, 6.0),
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "round": _round,
    "nan_to_num": _nan_to_num,
    "float": _to_fixed(torch.float32),
    "double": _to_fixed(torch.float64),
    "half bfloat16": _to_fixed(torch.float32),
    "int": _to_fixed(torch.int32),
    "long": _to_fixed(torch.int64),
    "short": _to_fixed(torch.int16),
    "char": _to_fixed(torch.int8),
    "byte": _to_fixed(torch.uint8),
    "bool": _to_fixed(torch.bool),
    "to type type_as": _to,
    "clone contiguous positive __pos__ alias conj resolve_conj resolve_neg": _same,
    "get:real": _same,
    "detach get:data": _detach,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _filled(None),
    "reshape view expand": _scalar_shape,
    "__getitem__": indexing.getitem,
    "select": indexing.select,
    "index_select": indexing.index_select,
    "gather": indexing.gather,
    "take": indexing.take,
    "embedding": indexing.embedding,
    "unbind __iter__": indexing.unbind,
    "transpose swapaxes swapdims": indexing.transpose,
    "permute": _permute,
    "t get:T get:mT get:H get:mH": indexing.reversed_dims,
    "unsqueeze": indexing.unsqueeze,
    "squeeze": indexing.squeeze,
    "sum": reductions.reduce_sum,
    "prod": reductions.reduce_prod,
    "mean": reductions.reduce_mean,
    "amax": reductions.amax,
    "amin": reductions.amin,
    "max": reductions.max_or_reduce("max"),
    "min": reductions.max_or_reduce("min"),
    "any": reductions.reduce_any,
    "all": reductions.reduce_all,
    "matmul __matmul__ mm mv dot vdot inner": reductions.matmul,
    "__rmatmul__": lambda trace, x, other: reductions.matmul(trace, other, x),
    "__bool__ is_nonzero": _bool,
    "size": _size,
    "numel nelement": _numel,
    "__len__": _len,
    "dim ndimension": lambda trace, x: len(_same(trace, x).dims),
    "is_floating_point": lambda trace, x: _same(trace, x).dtype.is_float,
    "is_complex is_conj is_neg": lambda trace, x: False,
    "get:is_cuda": lambda trace, x: trace.device.type == "cuda",
    "get:is_cpu": lambda trace, x: trace.device.type == "cpu",
}
LOWERINGS: dict[str, Lowering] = _build_table()


def function_name(func: Any) -> str:
    """The key of a torch function in LOWERINGS."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return f"get:{getattr(getattr(func, '__self__', None), '__name__', '')}"
    if name == "where" and func is torch.Tensor.where:
        return "where_method"
    return name
