"""The table of operations: semantics where torch has none, and every derivative."""

from __future__ import annotations

import math

import pytest
import torch

from attnloom.ir.builder import Builder, wrap_int
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, TensorSpec
from attnloom.ir.op_types import ProgramError
from attnloom.ir.ops import OPS
from attnloom.ir.passes.gradient import gradient

_FULL = (-3.0, 3.0)
_DOMAINS = {  # where the derivative exists and is moderate
    "log": (0.2, 5.0),
    "log2": (0.2, 5.0),
    "log1p": (-0.8, 5.0),
    "sqrt": (0.2, 5.0),
    "rsqrt": (0.2, 5.0),
    "pow": (0.2, 3.0),
    "asin": (-0.9, 0.9),
    "acos": (-0.9, 0.9),
    "acosh": (1.1, 5.0),
    "atanh": (-0.9, 0.9),
    "tan": (-1.2, 1.2),
    "reciprocal": (0.3, 4.0),
    "div": (0.3, 4.0),
    "mod": (0.3, 4.0),
    "fmod": (0.3, 4.0),
}
_FLOAT_OPS = [
    name
    for name, op in OPS.items()
    if name
    not in ("where", "cast", "and", "or", "xor", "not", "shl", "shr", "floordiv", "truncdiv")
    and op.result((DType.F32,) * op.arity) is DType.F32
]


def _unary_program(name: str) -> BoundProgram:
    """op(score) or op(score, t[q]) with t requiring grad."""
    build = Builder([TensorSpec(torch.float32, 1, True)])
    args = [build.input("score"), build.load(0, build.input("q"))][: OPS[name].arity]
    return BoundProgram(build.finish(build.node(name, *args)))


@pytest.mark.parametrize("name", _FLOAT_OPS)
def test_derivative_matches_autograd(name: str) -> None:
    bound = _unary_program(name)
    lo, hi = _DOMAINS.get(name, _FULL)
    generator = torch.Generator().manual_seed(1)
    x = lo + (hi - lo) * torch.rand(40, generator=generator, dtype=torch.float64)
    y = lo + (hi - lo) * torch.rand(40, generator=generator, dtype=torch.float64)
    dout = torch.randn(40, generator=generator, dtype=torch.float64)
    x.requires_grad_(), y.requires_grad_()
    q = torch.arange(40)
    out = interpret(BoundProgram(bound.program, (y,)), {"score": x, "q": q}, float64=True)[0]
    expected = torch.autograd.grad(out, (x, y), dout, allow_unused=True, materialize_grads=True)
    reverse = gradient(bound.program)
    inputs = {"score": x.detach(), "q": q, "dscore": dout}
    found = interpret(BoundProgram(reverse.program, (y.detach(),)), inputs, float64=True)
    torch.testing.assert_close(found[0].expand(40), expected[0])
    if OPS[name].arity == 2 and name != "copysign":
        (contribution,) = reverse.contributions
        value = found[reverse.program.outputs.index(contribution.value, 1)]
        torch.testing.assert_close(value.expand(40), expected[1])


_KINKS = [
    ("abs", 0.0, None),
    ("sign", 0.0, None),
    ("max", 1.5, 1.5),
    ("min", 1.5, 1.5),
    ("max", 1.5, 2.5),
    ("min", math.nan, 2.5),
    ("max", math.nan, 2.5),
    ("copysign", 0.0, -1.0),
    ("pow", 0.0, 2.0),
    ("pow", 2.0, 0.0),
    ("pow", 0.0, 0.0),
    ("sqrt", 0.0, None),
    ("floor", 2.0, None),
]


@pytest.mark.parametrize(("name", "x", "y"), _KINKS)
def test_kinks_follow_torch(name: str, x: float, y: float | None) -> None:
    bound = _unary_program(name)
    a = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([y or 0.0], dtype=torch.float64, requires_grad=True)
    torch_op = {"max": torch.maximum, "min": torch.minimum}.get(name, OPS[name].evaluate)
    args = (a, b)[: OPS[name].arity]
    expected = torch.autograd.grad(torch_op(*args).sum(), args)
    reverse = gradient(bound.program)
    inputs = {"score": a.detach(), "q": torch.tensor([0]), "dscore": torch.ones(1)}
    found = interpret(BoundProgram(reverse.program, (b.detach(),)), inputs, float64=True)
    torch.testing.assert_close(found[0].expand(1), expected[0], equal_nan=True)
    if reverse.contributions:
        torch.testing.assert_close(found[-1].expand(1), expected[1], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_integer_division_is_defined_everywhere(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    values = [least, least + 1, -7, -1, 0, 1, 6, most]
    pairs = [(a, b) for a in values for b in values]
    a, b = (torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True))
    found = {
        name: OPS[name].evaluate(a, b).tolist() for name in ("floordiv", "mod", "fmod", "truncdiv")
    }
    for i, (x, y) in enumerate(pairs):
        floor = x // y if y else 0
        trunc = (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) if y else 0
        wrapped = [wrap_int(value, DType.of(dtype)) for value in (floor, trunc)]
        assert found["floordiv"][i] == wrapped[0], (x, y)
        assert found["truncdiv"][i] == wrapped[1], (x, y)
        assert found["mod"][i] == (x - floor * y if y else 0), (x, y)
        assert found["fmod"][i] == (x - trunc * y if y else 0), (x, y)


def test_shift_counts_outside_the_type_shift_everything_out() -> None:
    value = torch.tensor([5, -5, 5, -5], dtype=torch.int32)
    count = torch.tensor([32, 40, -1, 31])
    assert OPS["shl"].evaluate(value, count).tolist() == [0, 0, 0, -(2**31)]
    assert OPS["shr"].evaluate(value, count).tolist() == [0, -1, 0, -1]


@pytest.mark.parametrize(
    ("op", "types"),
    [
        ("add", (DType.F32, DType.I64)),
        ("add", (DType.BOOL, DType.BOOL)),
        ("div", (DType.I64, DType.I64)),
        ("and", (DType.F32, DType.F32)),
        ("where", (DType.I64, DType.F32, DType.F32)),
        ("shl", (DType.F32, DType.I64)),
        ("isnan", (DType.I64,)),
        ("cast", (DType.I64,)),
    ],
)
def test_type_rules_reject(op: str, types: tuple[DType, ...]) -> None:
    with pytest.raises(ProgramError):
        OPS[op].result(types)
