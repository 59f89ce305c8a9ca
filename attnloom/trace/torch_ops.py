"""Every torch function that a mod may call, in one table: function name -> lowering.

The name is that of the function or method, so that `torch.exp(x)` and `x.exp()` share an entry;
properties carry the prefix `get:`. What is not here is a TraceError; `messages.py` says what to
write instead.
"""

from __future__ import annotations

from typing import Any

import torch

from attnloom.trace import elementwise as ew
from attnloom.trace import indexing, lowerings, reductions
from attnloom.trace.elementwise import Rule, apply, op
from attnloom.trace.lowerings import Lowering


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
    "relu": Rule(ew.relu),
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
    "add __add__ __radd__": lowerings.add("+", "add"),
    "sub subtract __sub__": lowerings.add("-", "sub"),
    "rsub __rsub__": lowerings.add("-", "sub", swap=True),
    "div divide true_divide __truediv__ __div__": lowerings.divide,
    "pow __pow__": lowerings.power,
    "__rpow__": lowerings.reflected_power,
    "__lshift__ bitwise_left_shift": lowerings.shift("shl"),
    "__rshift__ bitwise_right_shift": lowerings.shift("shr"),
    "__rlshift__": lowerings.shift("shl", swap=True),
    "__rrshift__": lowerings.shift("shr", swap=True),
    "where": lowerings.where,
    "where_method": lowerings.where_method,
    "masked_fill": lowerings.masked_fill,
    "clamp clip": lowerings.clamp,
    "clamp_min": lambda trace, x, min: lowerings.clamp(trace, x, min=min),  # noqa: A006
    "clamp_max": lambda trace, x, max: lowerings.clamp(trace, x, max=max),  # noqa: A006
    "hardtanh": lowerings.hardtanh,
    "relu6": lambda trace, x: lowerings.clamp(trace, x, 0.0, 6.0),
    "gelu": lowerings.gelu,
    "softplus": lowerings.softplus,
    "elu": lowerings.elu,
    "leaky_relu": lowerings.leaky_relu,
    "lerp": lowerings.lerp,
    "addcmul": lowerings.addcmul,
    "addcdiv": lowerings.addcdiv,
    "round": lowerings.round_,
    "nan_to_num": lowerings.nan_to_num,
    "float": lowerings.fixed_dtype(torch.float32),
    "double": lowerings.fixed_dtype(torch.float64),
    "half bfloat16": lowerings.fixed_dtype(torch.float32),
    "int": lowerings.fixed_dtype(torch.int32),
    "long": lowerings.fixed_dtype(torch.int64),
    "short": lowerings.fixed_dtype(torch.int16),
    "char": lowerings.fixed_dtype(torch.int8),
    "byte": lowerings.fixed_dtype(torch.uint8),
    "bool": lowerings.fixed_dtype(torch.bool),
    "to type type_as": lowerings.convert_to,
    "clone contiguous positive __pos__ alias conj resolve_conj resolve_neg": lowerings.same,
    "get:real": lowerings.same,
    "detach get:data": lowerings.detach,
    "zeros_like": lowerings.filled(0),
    "ones_like": lowerings.filled(1),
    "full_like": lowerings.filled(None),
    "new_zeros": lowerings.new_filled(0),
    "new_ones": lowerings.new_filled(1),
    "new_full": lowerings.new_filled(None),
    "reshape view expand": lowerings.keep_scalar,
    "__getitem__": indexing.getitem,
    "select": indexing.select,
    "index_select": indexing.index_select,
    "gather": indexing.gather,
    "take": indexing.take,
    "embedding": indexing.embedding,
    "unbind __iter__": indexing.unbind,
    "transpose swapaxes swapdims": indexing.transpose,
    "permute": lowerings.permute,
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
    "__bool__ is_nonzero": lowerings.truth,
    "size": lowerings.size,
    "numel nelement": lowerings.numel,
    "__len__": lowerings.length,
    "dim ndimension": lambda trace, x: len(lowerings.same(trace, x).dims),
    "is_floating_point": lambda trace, x: lowerings.same(trace, x).dtype.is_float,
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
