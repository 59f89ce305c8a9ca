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
from attnloom.ir import op_intervals as spans
from attnloom.ir import op_types as types
from attnloom.ir.interval import IntervalRule

Tensor = torch.Tensor
REDUCTIONS = ("sum", "prod", "min", "max", "any", "all")


@dataclass(frozen=True, slots=True)
class Op:
    """What the compiler knows of one operation.

    result: type of the result from those of the operands.
    evaluate: the operation on torch tensors that broadcast.
    derivative: adjoints of the operands from that of the result.
    interval: range of the result from those of the operands.
    """

    name: str
    arity: int
    result: types.TypeRule
    evaluate: Callable[..., Tensor]
    derivative: grads.Rule
    interval: IntervalRule


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


_floor_divide = _whole(torch.floor_divide, True)
_truncate = _whole(partial(torch.div, rounding_mode="trunc"), True)
_remainder = _whole(torch.remainder, False)
_fmod = _whole(torch.fmod, False)

_TABLE = (
    Op("add", 2, types.number, torch.add, grads.add, spans.add),
    Op("sub", 2, types.number, torch.sub, grads.sub, spans.sub),
    Op("mul", 2, types.number, torch.mul, grads.mul, spans.mul),
    Op("div", 2, types.real, torch.div, grads.div, spans.div),
    Op("floordiv", 2, types.number, _floor_divide, grads.none, spans.floordiv),
    Op("mod", 2, types.number, _remainder, grads.remainder("floordiv"), spans.mod),
    Op("fmod", 2, types.number, _fmod, grads.remainder("truncdiv"), spans.fmod),
    Op("truncdiv", 2, types.number, _truncate, grads.none, spans.truncdiv),
    Op("pow", 2, types.number, torch.pow, grads.power, spans.power),
    Op("neg", 1, types.number, torch.neg, grads.negate, spans.neg),
    Op("abs", 1, types.number, torch.abs, grads.absolute, spans.absolute),
    Op("sign", 1, types.number, torch.sign, grads.none, spans.sign),
    Op("min", 2, types.number, torch.minimum, grads.extremum("gt"), spans.minimum),
    Op("max", 2, types.number, torch.maximum, grads.extremum("lt"), spans.maximum),
    Op("eq", 2, types.comparison, torch.eq, grads.none, spans.comparison("eq")),
    Op("ne", 2, types.comparison, torch.ne, grads.none, spans.comparison("ne")),
    Op("lt", 2, types.comparison, torch.lt, grads.none, spans.comparison("lt")),
    Op("le", 2, types.comparison, torch.le, grads.none, spans.comparison("le")),
    Op("gt", 2, types.comparison, torch.gt, grads.none, spans.comparison("gt")),
    Op("ge", 2, types.comparison, torch.ge, grads.none, spans.comparison("ge")),
    Op("and", 2, types.bits, torch.bitwise_and, grads.none, spans.conjunction),
    Op("or", 2, types.bits, torch.bitwise_or, grads.none, spans.disjunction),
    Op("xor", 2, types.bits, torch.bitwise_xor, grads.none, spans.exclusive),
    Op("not", 1, types.bits, torch.bitwise_not, grads.none, spans.negation),
    Op("shl", 2, types.shift, _shift(torch.bitwise_left_shift), grads.none, spans.shift_left),
    Op("shr", 2, types.shift, _shift(torch.bitwise_right_shift), grads.none, spans.shift_right),
    Op("where", 3, types.select, torch.where, grads.where, spans.select),
    Op("cast", 1, types.explicit, _cast, grads.cast, spans.cast),
    Op("floor", 1, types.number, torch.floor, grads.none, spans.rounding(torch.floor)),
    Op("ceil", 1, types.number, torch.ceil, grads.none, spans.rounding(torch.ceil)),
    Op("round", 1, types.number, torch.round, grads.none, spans.rounding(torch.round)),
    Op("trunc", 1, types.number, torch.trunc, grads.none, spans.rounding(torch.trunc)),
    Op("exp", 1, types.real, torch.exp, grads.exp, spans.rising(torch.exp, 0.0)),
    Op("exp2", 1, types.real, torch.exp2, grads.exp2, spans.rising(torch.exp2, 0.0)),
    Op("expm1", 1, types.real, torch.expm1, grads.expm1, spans.rising(torch.expm1, -1.0)),
    Op("log", 1, types.real, torch.log, grads.log, spans.rising(torch.log)),
    Op("log2", 1, types.real, torch.log2, grads.log2, spans.rising(torch.log2)),
    Op("log1p", 1, types.real, torch.log1p, grads.log1p, spans.rising(torch.log1p)),
    Op("sqrt", 1, types.real, torch.sqrt, grads.sqrt, spans.rising(torch.sqrt, 0.0)),
    Op("rsqrt", 1, types.real, torch.rsqrt, grads.rsqrt, spans.rsqrt),
    Op("sin", 1, types.real, torch.sin, grads.sin, spans.bounded(1.0)),
    Op("cos", 1, types.real, torch.cos, grads.cos, spans.bounded(1.0)),
    Op("tan", 1, types.real, torch.tan, grads.tan, spans.anything),
    Op("asin", 1, types.real, torch.asin, grads.asin, spans.rising(torch.asin, -1.6, 1.6)),
    Op("acos", 1, types.real, torch.acos, grads.acos, spans.falling(torch.acos, 0.0, 3.2)),
    Op("atan", 1, types.real, torch.atan, grads.atan, spans.rising(torch.atan, -1.6, 1.6)),
    Op("atan2", 2, types.real, torch.atan2, grads.atan2, spans.bounded(3.2)),
    Op("sinh", 1, types.real, torch.sinh, grads.sinh, spans.rising(torch.sinh)),
    Op("cosh", 1, types.real, torch.cosh, grads.cosh, spans.cosh),
    Op("tanh", 1, types.real, torch.tanh, grads.tanh, spans.rising(torch.tanh, -1.0, 1.0)),
    Op("asinh", 1, types.real, torch.asinh, grads.asinh, spans.rising(torch.asinh)),
    Op("acosh", 1, types.real, torch.acosh, grads.acosh, spans.rising(torch.acosh, 0.0)),
    Op("atanh", 1, types.real, torch.atanh, grads.atanh, spans.rising(torch.atanh)),
    Op(
        "sigmoid",
        1,
        types.real,
        torch.sigmoid,
        grads.sigmoid,
        spans.rising(torch.sigmoid, 0.0, 1.0),
    ),
    Op("erf", 1, types.real, torch.erf, grads.erf, spans.rising(torch.erf, -1.0, 1.0)),
    Op("erfc", 1, types.real, torch.erfc, grads.erfc, spans.falling(torch.erfc, 0.0, 2.0)),
    Op("reciprocal", 1, types.real, torch.reciprocal, grads.reciprocal, spans.reciprocal),
    Op("isnan", 1, types.classification, torch.isnan, grads.none, spans.isnan),
    Op("isinf", 1, types.classification, torch.isinf, grads.none, spans.isinf),
    Op("isfinite", 1, types.classification, torch.isfinite, grads.none, spans.isfinite),
    Op("copysign", 2, types.real, torch.copysign, grads.copysign, spans.copysign),
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}
