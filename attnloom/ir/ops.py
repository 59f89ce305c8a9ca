"""Every operation of the IR in one table.

Semantics are those of torch on 0-d tensors of the same type. Where torch has no value, the IR does,
because lanes that are masked off may meet it: dividing an integer by zero, or its remainder, is 0,
and the most negative integer divided by -1 wraps to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnloom.ir import op_types as types

Tensor = torch.Tensor
REDUCTIONS = ("sum", "prod", "min", "max", "any", "all")


@dataclass(frozen=True, slots=True)
class Op:
    """What the compiler knows of one operation.

    result: type of the result from those of the operands.
    evaluate: the operation on torch tensors that broadcast.
    """

    name: str
    arity: int
    result: types.TypeRule
    evaluate: Callable[..., Tensor]


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


_TABLE = (
    Op("add", 2, types.number, torch.add),
    Op("sub", 2, types.number, torch.sub),
    Op("mul", 2, types.number, torch.mul),
    Op("div", 2, types.real, torch.div),
    Op("floordiv", 2, types.number, _whole(torch.floor_divide, True)),
    Op("mod", 2, types.number, _whole(torch.remainder, False)),
    Op("fmod", 2, types.number, _whole(torch.fmod, False)),
    Op(
        "truncdiv",
        2,
        types.number,
        _whole(lambda a, b: torch.div(a, b, rounding_mode="trunc"), True),
    ),
    Op("pow", 2, types.number, torch.pow),
    Op("neg", 1, types.number, torch.neg),
    Op("abs", 1, types.number, torch.abs),
    Op("sign", 1, types.number, torch.sign),
    Op("min", 2, types.number, torch.minimum),
    Op("max", 2, types.number, torch.maximum),
    Op("eq", 2, types.comparison, torch.eq),
    Op("ne", 2, types.comparison, torch.ne),
    Op("lt", 2, types.comparison, torch.lt),
    Op("le", 2, types.comparison, torch.le),
    Op("gt", 2, types.comparison, torch.gt),
    Op("ge", 2, types.comparison, torch.ge),
    Op("and", 2, types.bits, torch.bitwise_and),
    Op("or", 2, types.bits, torch.bitwise_or),
    Op("xor", 2, types.bits, torch.bitwise_xor),
    Op("not", 1, types.bits, torch.bitwise_not),
    Op("shl", 2, types.shift, _shift(torch.bitwise_left_shift)),
    Op("shr", 2, types.shift, _shift(torch.bitwise_right_shift)),
    Op("where", 3, types.select, torch.where),
    Op("cast", 1, types.explicit, _cast),
    Op("floor", 1, types.number, torch.floor),
    Op("ceil", 1, types.number, torch.ceil),
    Op("round", 1, types.number, torch.round),
    Op("trunc", 1, types.number, torch.trunc),
    Op("exp", 1, types.real, torch.exp),
    Op("exp2", 1, types.real, torch.exp2),
    Op("expm1", 1, types.real, torch.expm1),
    Op("log", 1, types.real, torch.log),
    Op("log2", 1, types.real, torch.log2),
    Op("log1p", 1, types.real, torch.log1p),
    Op("sqrt", 1, types.real, torch.sqrt),
    Op("rsqrt", 1, types.real, torch.rsqrt),
    Op("sin", 1, types.real, torch.sin),
    Op("cos", 1, types.real, torch.cos),
    Op("tan", 1, types.real, torch.tan),
    Op("asin", 1, types.real, torch.asin),
    Op("acos", 1, types.real, torch.acos),
    Op("atan", 1, types.real, torch.atan),
    Op("atan2", 2, types.real, torch.atan2),
    Op("sinh", 1, types.real, torch.sinh),
    Op("cosh", 1, types.real, torch.cosh),
    Op("tanh", 1, types.real, torch.tanh),
    Op("asinh", 1, types.real, torch.asinh),
    Op("acosh", 1, types.real, torch.acosh),
    Op("atanh", 1, types.real, torch.atanh),
    Op("sigmoid", 1, types.real, torch.sigmoid),
    Op("erf", 1, types.real, torch.erf),
    Op("erfc", 1, types.real, torch.erfc),
    Op("reciprocal", 1, types.real, torch.reciprocal),
    Op("isnan", 1, types.classification, torch.isnan),
    Op("isinf", 1, types.classification, torch.isinf),
    Op("isfinite", 1, types.classification, torch.isfinite),
    Op("copysign", 2, types.real, torch.copysign),
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
