"""Every operation of the IR in one table.

Semantics are those of torch on 0-d tensors of the same type. Where torch has no value, the IR does,
because lanes that are masked off may meet it: dividing an integer by zero, or its remainder, is 0,
and the most negative integer divided by -1 wraps to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from attnloom.ir import op_derivatives as grads
from attnloom.ir import op_types as types

Tensor = torch.Tensor
REDUCTIONS = ("sum", "prod", "min", "max", "any", "all")


@dataclass(frozen=True, slots=True)
class Op:
    """What the compiler knows of one operation.

    result: type of the result from those of the operands.
    evaluate: the operation on torch tensors that broadcast.
    derivative: adjoints of the operands from that of the result.
    """

    name: str
    arity: int
    result: types.TypeRule
    evaluate: Callable[..., Tensor]
    derivative: grads.Rule


def _whole(divide: Callable[[Tensor, Tensor], Tensor], negative: bool) -> Callable[..., Tensor]:
    """An integer division that is defined for every pair: by 0 it is 0, by -1 it wraps."""

    def evaluate(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype.is_floating_point:
            return divide(a, b)
        special = (b == 0) | (b == -1) if b.dtype.is_signed else b == 0
        result = divide(a, torch.where(special, torch.ones_like(b), b))
        minus = -a if negative else torch.zeros_like(a)
        return torch.where(special, torch.where(b == 0, torch.zeros_like(a), minus), result)

    return evaluate


def _shift(shift: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A shift whose count may be anything: outside 0 .. bits - 1 all bits leave."""

    def evaluate(a: Tensor, count: Tensor) -> Tensor:
        bits = a.dtype.itemsize * 8
        wide = count.to(torch.int64)
        outside = (wide < 0) | (wide >= bits)
        return shift(a, torch.where(outside, bits, wide).to(a.dtype))

    return evaluate


def _cast(_: Tensor) -> Tensor:
    raise types.ProgramError("cast needs its type; interpret.py evaluates it")


_truncate = partial(torch.div, rounding_mode="trunc")
_TABLE = (
    Op("add", 2, types.number, torch.add, grads.add),
    Op("sub", 2, types.number, torch.sub, grads.sub),
    Op("mul", 2, types.number, torch.mul, grads.mul),
    Op("div", 2, types.real, torch.div, grads.div),
    Op("floordiv", 2, types.number, _whole(torch.floor_divide, True), grads.none),
    Op("mod", 2, types.number, _whole(torch.remainder, False), grads.remainder("floordiv")),
    Op("fmod", 2, types.number, _whole(torch.fmod, False), grads.remainder("truncdiv")),
    Op("truncdiv", 2, types.number, _whole(_truncate, True), grads.none),
    Op("pow", 2, types.number, torch.pow, grads.power),
    Op("neg", 1, types.number, torch.neg, grads.negate),
    Op("abs", 1, types.number, torch.abs, grads.absolute),
    Op("sign", 1, types.number, torch.sign, grads.none),
    Op("min", 2, types.number, torch.minimum, grads.extremum("gt")),
    Op("max", 2, types.number, torch.maximum, grads.extremum("lt")),
    Op("eq", 2, types.comparison, torch.eq, grads.none),
    Op("ne", 2, types.comparison, torch.ne, grads.none),
    Op("lt", 2, types.comparison, torch.lt, grads.none),
    Op("le", 2, types.comparison, torch.le, grads.none),
    Op("gt", 2, types.comparison, torch.gt, grads.none),
    Op("ge", 2, types.comparison, torch.ge, grads.none),
    Op("and", 2, types.bits, torch.bitwise_and, grads.none),
    Op("or", 2, types.bits, torch.bitwise_or, grads.none),
    Op("xor", 2, types.bits, torch.bitwise_xor, grads.none),
    Op("not", 1, types.bits, torch.bitwise_not, grads.none),
    Op("shl", 2, types.shift, _shift(torch.bitwise_left_shift), grads.none),
    Op("shr", 2, types.shift, _shift(torch.bitwise_right_shift), grads.none),
    Op("where", 3, types.select, torch.where, grads.where),
    Op("cast", 1, types.explicit, _cast, grads.cast),
    Op("floor", 1, types.number, torch.floor, grads.none),
    Op("ceil", 1, types.number, torch.ceil, grads.none),
    Op("round", 1, types.number, torch.round, grads.none),
    Op("trunc", 1, types.number, torch.trunc, grads.none),
    Op("exp", 1, types.real, torch.exp, grads.exp),
    Op("exp2", 1, types.real, torch.exp2, grads.exp2),
    Op("expm1", 1, types.real, torch.expm1, grads.expm1),
    Op("log", 1, types.real, torch.log, grads.log),
    Op("log2", 1, types.real, torch.log2, grads.log2),
    Op("log1p", 1, types.real, torch.log1p, grads.log1p),
    Op("sqrt", 1, types.real, torch.sqrt, grads.sqrt),
    Op("rsqrt", 1, types.real, torch.rsqrt, grads.rsqrt),
    Op("sin", 1, types.real, torch.sin, grads.sin),
    Op("cos", 1, types.real, torch.cos, grads.cos),
    Op("tan", 1, types.real, torch.tan, grads.tan),
    Op("asin", 1, types.real, torch.asin, grads.asin),
    Op("acos", 1, types.real, torch.acos, grads.acos),
    Op("atan", 1, types.real, torch.atan, grads.atan),
    Op("atan2", 2, types.real, torch.atan2, grads.atan2),
    Op("sinh", 1, types.real, torch.sinh, grads.sinh),
    Op("cosh", 1, types.real, torch.cosh, grads.cosh),
    Op("tanh", 1, types.real, torch.tanh, grads.tanh),
    Op("asinh", 1, types.real, torch.asinh, grads.asinh),
    Op("acosh", 1, types.real, torch.acosh, grads.acosh),
    Op("atanh", 1, types.real, torch.atanh, grads.atanh),
    Op("sigmoid", 1, types.real, torch.sigmoid, grads.sigmoid),
    Op("erf", 1, types.real, torch.erf, grads.erf),
    Op("erfc", 1, types.real, torch.erfc, grads.erfc),
    Op("reciprocal", 1, types.real, torch.reciprocal, grads.reciprocal),
    Op("isnan", 1, types.classification, torch.isnan, grads.none),
    Op("isinf", 1, types.classification, torch.isinf, grads.none),
    Op("isfinite", 1, types.classification, torch.isfinite, grads.none),
    Op("copysign", 2, types.real, torch.copysign, grads.copysign),
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
