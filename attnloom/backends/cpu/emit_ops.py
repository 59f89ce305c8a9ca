"""The C++ text of every operation of the IR, and of types, constants and casts.

`{0}`, `{1}`, ... stand for operands. Functions are those of kernels/lanes.h and kernels/vecmath.h,
which overload one name for vectors and scalars. Nothing of a user's text reaches the source: names
derive from node numbers, constants are printed as checked integers and exact hexadecimal floats.
"""

from __future__ import annotations

import ctypes
import math

from attnloom.ir.node import DType, Node

SCALAR_TYPES = {
    DType.BOOL: "bool",
    DType.F32: "float",
    DType.F64: "double",
} | dict.fromkeys((DType.U8, DType.I8, DType.I16, DType.I32, DType.I64), "i64")
VECTOR_TYPES = {
    DType.BOOL: "vm",
    DType.F32: "v_f32",
    DType.F64: "v_f64",
} | dict.fromkeys((DType.U8, DType.I8, DType.I16, DType.I32, DType.I64), "vi")
# One element of a vector stored in memory.
ELEMENT_TYPES = (
    SCALAR_TYPES
    | {DType.BOOL: "real_bits"}
    | {t: "ilane" for t, name in SCALAR_TYPES.items() if name == "i64"}
)
# Storage types of kernels/capture.h, by the name torch gives them.
STORAGE_TYPES = {
    "torch.bool": "bool8",
    "torch.uint8": "u8",
    "torch.int8": "i8",
    "torch.int16": "i16",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float32": "float",
    "torch.float64": "double",
}
_BITS = {DType.U8: 8, DType.I8: 8, DType.I16: 16, DType.I32: 32, DType.I64: 64}

_ARITHMETIC = {"add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "neg": "(-{0})"}
_FLOAT_UNARY = (
    "floor ceil round trunc exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan asin acos atan"
    " sinh cosh tanh asinh acosh atanh sigmoid erf erfc reciprocal isnan isinf isfinite sign"
).split()
_FLOAT_BINARY = "floordiv mod fmod pow atan2 copysign".split()
FLOAT_OPS = (
    _ARITHMETIC
    | {name: f"v_{name}({{0}})" for name in _FLOAT_UNARY}
    | {name: f"v_{name}({{0}}, {{1}})" for name in _FLOAT_BINARY}
    | {
        "div": "({0} / {1})",
        "truncdiv": "v_trunc({0} / {1})",
        "abs": "v_fabs({0})",
        "min": "v_fmin({0}, {1})",
        "max": "v_fmax({0}, {1})",
    }
)
# Bits are those of the type: a count beyond them moves every bit out.
INT_OPS = _ARITHMETIC | {
    "floordiv": "v_ifloordiv({0}, {1})",
    "mod": "v_imod({0}, {1})",
    "fmod": "v_ifmod({0}, {1})",
    "truncdiv": "v_truncdiv({0}, {1})",
    "pow": "v_ipow<BITS>({0}, {1})",
    "abs": "v_iabs({0})",
    "sign": "v_sign({0})",
    "min": "v_imin({0}, {1})",
    "max": "v_imax({0}, {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
    "shl": "v_shl<BITS>({0}, {1})",
    "shr": "v_shr<BITS>({0}, {1})",
    "floor": "{0}",
    "ceil": "{0}",
    "round": "{0}",
    "trunc": "{0}",
}
BOOL_OPS = {"and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})", "not": "(!{0})"}
BOOL_VECTOR_OPS = BOOL_OPS | {"not": "(~{0})"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Lanes of a mask are 0 and -1, so that true is the smaller.
_MASK_COMPARE = {
    "eq": "(~({0} ^ {1}))",
    "ne": "({0} ^ {1})",
    "lt": "(~{0} & {1})",
    "le": "(~{0} | {1})",
    "gt": "({0} & ~{1})",
    "ge": "({0} | ~{1})",
}
_KEEP_RANGE = frozenset("mod fmod min max and or xor sign shr floor ceil round trunc where".split())
# Variants that reach one unit in the last place.
EXACT_OPS = frozenset({"tanh"})

REDUCE = {
    "sum": "({0} + {1})",
    "prod": "({0} * {1})",
    "any": "({0} | {1})",
    "all": "({0} & {1})",
}


def wrapped(text: str, dtype: DType) -> str:
    """`text`, an integer, reduced to what its type holds."""
    if dtype is DType.I64:
        return text
    kind = "unsigned" if dtype is DType.U8 else "signed"
    return f"wrap_{kind}<{_BITS[dtype]}>({text})"


def constant(value: object, dtype: DType) -> str:
    """A literal of the scalar type."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_int:
        number = int(str(value))
        assert -(2**63) <= number < 2**63, "the IR keeps integers within their type"
        return "(-9223372036854775807ll - 1)" if number == -(2**63) else f"({number}ll)"
    number = float(str(value))
    name = SCALAR_TYPES[dtype]
    if math.isnan(number):
        return f'(({name})__builtin_nan(""))'
    if dtype is DType.F32:
        number = ctypes.c_float(number).value
    if math.isinf(number):
        return f"({'-' if number < 0 else ''}({name})__builtin_inf())"
    return f"({number.hex()}{'f' if dtype is DType.F32 else ''})"


def operation(node: Node, operand: DType, vector: bool, exact: bool) -> str:
    """Template of an operation.

    Args:
        operand: type of the first operand (of the arms, for `where`).
        vector: operands and result are vectors.
        exact: use the variant of one unit in the last place, where there are two.
    """
    op = node.op
    if op in _COMPARE:
        if not vector:
            return f"({{0}} {_COMPARE[op]} {{1}})"
        return _MASK_COMPARE[op] if operand is DType.BOOL else f"v_{op}({{0}}, {{1}})"
    if operand is DType.BOOL:
        return (BOOL_VECTOR_OPS if vector else BOOL_OPS)[op]
    if operand.is_float:
        return FLOAT_OPS[op].replace("v_tanh", "v_tanh_exact" if exact else "v_tanh")
    text = INT_OPS[op].replace("BITS", str(_BITS[operand]))
    return text if op in _KEEP_RANGE else wrapped(text, node.dtype)


def cast(source: DType, target: DType, vector: bool) -> str:
    """Template of a conversion."""
    if source is target:
        return "{0}"
    if target is DType.BOOL:
        return f"v_ne({{0}}, {VECTOR_TYPES[source]}{{{{}}}})" if vector else "({0} != 0)"
    if target.is_int:
        if source is DType.BOOL:
            return "mask_to_int({0})" if vector else "(i64)({0})"
        if source.is_float:
            return wrapped("float_to_int({0})" if vector else "to_i64({0})", target)
        return wrapped("{0}", target)
    name = SCALAR_TYPES[target]
    if not vector:
        return f"({name})({{0}})"
    if source is DType.BOOL:
        return f"mask_to_float<v_{target.value}>({{0}})"
    return f"CONVERT({{0}}, v_{target.value})"


def broadcast(text: str, dtype: DType) -> str:
    """A vector of equal lanes."""
    return f"vm_set({text})" if dtype is DType.BOOL else f"splat<{VECTOR_TYPES[dtype]}>({text})"


def neutral(kind: str, dtype: DType, vector: bool) -> str:
    """What a reduction over nothing gives. The widest integers do not fit narrow lanes."""
    if kind in ("any", "all"):
        return constant(kind == "all", DType.BOOL)
    if kind in ("sum", "prod"):
        return constant(int(kind == "prod"), dtype)
    if dtype.is_float:
        return constant(math.inf if kind == "min" else -math.inf, dtype)
    if vector and dtype is DType.I64:
        return "ILANE_MAX" if kind == "min" else "ILANE_MIN"
    high = 255 if dtype is DType.U8 else (1 << _BITS[dtype] - 1) - 1
    low = 0 if dtype is DType.U8 else -high - 1
    return constant(high if kind == "min" else low, dtype)


def reducing(kind: str, dtype: DType) -> str:
    """Template of one step of a reduction: {0} is the result so far."""
    if kind in ("min", "max"):
        return FLOAT_OPS[kind] if dtype.is_float else INT_OPS[kind]
    return wrapped(REDUCE[kind], dtype) if dtype.is_int else REDUCE[kind]
