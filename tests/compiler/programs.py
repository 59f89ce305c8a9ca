"""Random programs and values for them.

`SMOOTH` operations stay finite and differentiable almost everywhere, so that gradients can be
compared without exceptions; `EVERYTHING` covers all of OPS, NaN and overflow included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from attnloom.ir.builder import Builder
from attnloom.ir.node import Axes, BoundProgram, DType, Program, TensorSpec
from attnloom.ir.ops import OPS

Tensor = torch.Tensor
TENSORS = (
    TensorSpec(torch.float32, 1, True),
    TensorSpec(torch.float32, 2, True),
    TensorSpec(torch.int64, 1),
    TensorSpec(torch.bool, 2),
    TensorSpec(torch.float16, 1),
    TensorSpec(torch.int32, 1),
)
SIZES = ((5,), (4, 3), (7,), (6, 6), (5,), (6,))
NUMBERS = (DType.I64, DType.F32)
REDUCTIONS = ((1, 1), (0, 0))

_ARITHMETIC = ("add", "sub", "mul", "neg", "abs", "min", "max", "sign")
_ROUNDING = ("floor", "ceil", "round", "trunc")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
SMOOTH = (*_ARITHMETIC, *_COMPARE, *_ROUNDING, "where", "and", "or", "xor", "not", "cast")
SMOOTH += ("sin", "cos", "tanh", "sigmoid", "erf", "erfc", "atan", "asinh", "copysign")
# Results do not depend on which of torch's implementations of a function is called. sqrt is not
# one: torch rounds 12 of 252 elements to the neighbour of the nearest (torch 2.13, an AMD EPYC),
# and what is left of 1e30 by such a number is another.
EXACT = (*_ARITHMETIC, *_COMPARE, *_ROUNDING, "where", "and", "or", "xor", "not", "cast")
EXACT += ("div", "floordiv", "mod", "fmod", "truncdiv", "shl", "shr", "copysign", "isnan")
EXACT += ("isinf", "isfinite", "reciprocal")
EVERYTHING = tuple(OPS)

_FLOAT_CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, -7.25, 0.1, math.inf, math.nan, 1e30)
_SMOOTH_CONSTANTS = (0.0, 1.0, -1.0, 2.0, 0.5, 0.1, -1.5)
_INT_CONSTANTS = (0, 1, -1, 2, 3, 4, 8, 63, 64, 1000, -5, 2**31, 2**62)


@dataclass
class _Growing:
    """A builder and its nodes by type, from which operands are drawn."""

    build: Builder
    pool: dict[DType, list[int]]
    ops: tuple[str, ...]
    smooth: bool

    def add(self, index: int) -> int:
        self.pool.setdefault(self.build.dtype(index), []).append(index)
        return index

    def pick(self, draw: st.DrawFn, dtype: DType) -> int:
        # Late nodes are likelier, so that programs grow deep.
        nodes = self.pool[dtype]
        back = draw(st.integers(0, len(nodes) - 1))
        return nodes[len(nodes) - 1 - back]


def _leaves(smooth: bool, score: bool) -> _Growing:
    build = Builder(TENSORS, NUMBERS, REDUCTIONS)
    growing = _Growing(build, {}, (), smooth)
    for dtype in (DType.F32, DType.I64, DType.I32, DType.BOOL):
        values = _SMOOTH_CONSTANTS if smooth else _FLOAT_CONSTANTS
        constants = values if dtype.is_float else _INT_CONSTANTS
        for value in (True, False) if dtype is DType.BOOL else constants[-3:]:
            growing.add(build.const(value, dtype))
    growing.add(build.number(0, DType.I64))
    growing.add(build.number(1, DType.F32))
    for name in ("b", "h", "q", "kv", *(("score",) if score else ())):
        growing.add(build.input(name))
    return growing


def _step(draw: st.DrawFn, g: _Growing) -> None:
    kind = draw(st.sampled_from(("op",) * 8 + ("load", "const", "reduce")))
    build = g.build
    if kind == "const":
        dtype = draw(st.sampled_from((DType.F32, DType.I64, DType.I32)))
        floats = _SMOOTH_CONSTANTS if g.smooth else _FLOAT_CONSTANTS
        g.add(
            build.const(draw(st.sampled_from(floats if dtype.is_float else _INT_CONSTANTS)), dtype)
        )
    elif kind == "load":
        slot = draw(st.integers(0, len(TENSORS) - 1))
        g.add(build.load(slot, *(g.pick(draw, DType.I64) for _ in range(TENSORS[slot].rank))))
    elif kind == "reduce":
        _reduction(draw, g)
    else:
        _operation(draw, g)


def _reduction(draw: st.DrawFn, g: _Growing) -> None:
    """A reduction of a captured row, times something from outside."""
    build = g.build
    number = draw(st.integers(0, len(REDUCTIONS) - 1))
    step = build.input(f"r{number}")
    if number == 0:
        row = build.load(1, g.pick(draw, DType.I64), step)
    else:
        row = build.load(0, step)
    body = build.node(draw(st.sampled_from(("add", "mul"))), row, g.pick(draw, DType.F32))
    axis = (Axes.R0, Axes.R1)[number]
    kinds = ("sum", "max", "min", "prod", "any")
    kind = draw(st.sampled_from(kinds[:3] if g.smooth else kinds))
    if kind == "any":
        body = build.node("gt", body, g.pick(draw, DType.F32))
    g.add(build.reduce(kind, axis, body))


def _operation(draw: st.DrawFn, g: _Growing) -> None:
    build, op = g.build, draw(st.sampled_from(g.ops))
    dtype = draw(st.sampled_from(_OPERAND_TYPES.get(op, (DType.F32,))))
    if op == "cast":
        target = draw(st.sampled_from((DType.F32, DType.I64, DType.I32, DType.BOOL)))
        g.add(build.cast(g.pick(draw, dtype), target))
    elif op == "where":
        condition = g.pick(draw, DType.BOOL)
        g.add(build.node(op, condition, g.pick(draw, dtype), g.pick(draw, dtype)))
    else:
        g.add(build.node(op, *(g.pick(draw, dtype) for _ in range(OPS[op].arity))))


_NUMBERS = (DType.F32, DType.I64, DType.I32)
_OPERAND_TYPES: dict[str, tuple[DType, ...]] = dict.fromkeys(
    (*_ARITHMETIC, *_ROUNDING, "floordiv", "mod", "fmod", "truncdiv", "pow"), _NUMBERS
)
_OPERAND_TYPES |= dict.fromkeys((*_COMPARE, "where", "cast"), (*_NUMBERS, DType.BOOL))
_OPERAND_TYPES |= dict.fromkeys(("and", "or", "xor", "not"), (DType.BOOL, DType.I64, DType.I32))
_OPERAND_TYPES |= dict.fromkeys(("shl", "shr"), (DType.I64, DType.I32))


@st.composite
def programs(
    draw: st.DrawFn,
    ops: tuple[str, ...] = EVERYTHING,
    result: DType = DType.F32,
    score: bool = True,
    smooth: bool = False,
) -> Program:
    """A program of up to 14 random operations with one output of type `result`."""
    growing = _leaves(smooth, score)
    growing.ops = ops
    for _ in range(draw(st.integers(1, 14))):
        _step(draw, growing)
    return growing.build.finish(growing.pool[result][-1])


def bind(program: Program, seed: int) -> BoundProgram:
    """Captured tensors and numbers for a random program; floats of moderate size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec, size in zip(TENSORS, SIZES, strict=True):
        if spec.dtype is torch.bool:
            tensors.append(torch.randint(0, 2, size, generator=generator).bool())
        elif spec.dtype.is_floating_point:
            tensors.append(torch.randn(size, generator=generator).to(spec.dtype))
        else:
            tensors.append(torch.randint(-9, 9, size, generator=generator).to(spec.dtype))
    return BoundProgram(program, tuple(tensors), (seed % 11 - 4, 0.75))


def positions(
    batches: range = range(2),
    heads: range = range(3),
    rows: range = range(6),
    columns: range = range(7),
    seed: int = 0,
) -> dict[str, Tensor]:
    """Inputs [B, H, Q, KV] of every lane of a rectangle, with random scores."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(len(r) for r in (batches, heads, rows, columns))
    names = ("b", "h", "q", "kv")
    inputs = {
        name: torch.tensor(list(r)).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, r) in enumerate(zip(names, (batches, heads, rows, columns), strict=True))
    }
    return inputs | {"score": torch.randn(shape, generator=generator)}
