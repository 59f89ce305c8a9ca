"""Simplified programs mean the same, bit for bit, and known patterns become what they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.ir.builder import Builder
from attnloom.ir.interpret import interpret
from attnloom.ir.node import DType, Program, TensorSpec
from attnloom.ir.passes.simplify import simplify
from attnloom.ir.text import text
from attnloom.ir.verify import verify
from tests.compiler.programs import EVERYTHING, EXACT, bind, positions, programs

F32, I64, I32, BOOL = DType.F32, DType.I64, DType.I32, DType.BOOL


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Floats as integers, so that zeros of both signs differ; all NaN are one."""
    if not value.dtype.is_floating_point:
        return value
    return torch.where(value.isnan(), torch.nan, value).view(torch.int32)


@settings(deadline=None, max_examples=200)
@given(programs(ops=EXACT), st.integers(0, 99))
def test_random_programs_keep_every_bit(program: Program, seed: int) -> None:
    simpler = verify(simplify(program))
    assert len(simpler.nodes) <= len(program.nodes) + 4  # a select on BOOL may become `~c & x`
    assert (simpler.tensors, simpler.numbers) == (program.tensors, program.numbers)
    inputs = positions(seed=seed)
    shape = inputs["score"].shape
    before, after = (
        interpret(bind(p, seed), inputs)[0].expand(shape).contiguous() for p in (program, simpler)
    )
    assert torch.equal(_bits(before), _bits(after))


@settings(deadline=None, max_examples=100)
@given(programs(ops=EVERYTHING), st.booleans())
def test_random_programs_stay_valid_and_settle(program: Program, exact: bool) -> None:
    once = verify(simplify(program, exact))
    assert simplify(once, exact).nodes == once.nodes


Make = Callable[[Builder, int, int, int, int], int]  # build, score, q, kv, flag -> output


def _lines(make: Make, exact: bool = True) -> str:
    """The simplified program without its leaves' numbering: op names and operands."""
    b = Builder([TensorSpec(torch.float32, 1)])
    flag = b.node("lt", b.input("q"), b.input("kv"))
    out = make(b, b.input("score"), b.input("q"), b.input("kv"), flag)
    program = verify(simplify(b.finish(out), exact))

    def form(index: int) -> str:
        node = program.nodes[index]
        if node.op in ("input", "const"):
            return str(node.attr)
        name = f"{node.op}:{node.dtype.value}" if node.op == "cast" else node.op
        return f"{name}({', '.join(form(a) for a in node.args)})"

    return form(program.outputs[0])


def _c(b: Builder, value: float, dtype: DType = F32) -> int:
    return b.const(value, dtype)


_PATTERNS: list[tuple[str, Make]] = [
    ("score", lambda b, s, q, k, f: b.node("mul", _c(b, 1.0), s)),
    ("add(score, 0.0)", lambda b, s, q, k, f: b.node("add", s, _c(b, 0.0))),
    ("score", lambda b, s, q, k, f: b.node("add", s, _c(b, -0.0))),
    ("score", lambda b, s, q, k, f: b.node("sub", s, _c(b, 0.0))),
    ("mul(score, 0.0)", lambda b, s, q, k, f: b.node("mul", s, _c(b, 0.0))),
    ("mul(score, 0.125)", lambda b, s, q, k, f: b.node("div", s, _c(b, 8.0))),
    ("div(score, 3.0)", lambda b, s, q, k, f: b.node("div", s, _c(b, 3.0))),
    ("score", lambda b, s, q, k, f: b.node("neg", b.node("neg", s))),
    ("mul(score, score)", lambda b, s, q, k, f: b.node("pow", s, _c(b, 2.0))),
    ("sqrt(score)", lambda b, s, q, k, f: b.node("pow", s, _c(b, 0.5))),
    ("isnan(score)", lambda b, s, q, k, f: b.node("ne", s, s)),
    ("eq(score, score)", lambda b, s, q, k, f: b.node("eq", s, s)),
    ("not(lt(score, 0.0))", lambda b, s, q, k, f: b.node("not", b.node("lt", s, _c(b, 0.0)))),
    ("ge(q, kv)", lambda b, s, q, k, f: b.node("not", f)),
    ("True", lambda b, s, q, k, f: b.node("ge", q, q)),
    ("0", lambda b, s, q, k, f: b.node("sub", q, q)),
    ("0", lambda b, s, q, k, f: b.node("mul", q, _c(b, 0, I64))),
    ("shr(q, 6)", lambda b, s, q, k, f: b.node("floordiv", q, _c(b, 64, I64))),
    ("and(q, 63)", lambda b, s, q, k, f: b.node("mod", q, _c(b, 64, I64))),
    ("mod(q, 48)", lambda b, s, q, k, f: b.node("mod", q, _c(b, 48, I64))),
    (
        "add(q, 5)",
        lambda b, s, q, k, f: b.node("add", _c(b, 2, I64), b.node("add", q, _c(b, 3, I64))),
    ),
    ("lt(q, kv)", lambda b, s, q, k, f: b.node("and", f, _c(b, True, BOOL))),
    ("False", lambda b, s, q, k, f: b.node("and", f, b.node("not", f))),
    ("score", lambda b, s, q, k, f: b.node("where", f, s, s)),
    (
        "where(lt(q, kv), score, 0.0)",
        lambda b, s, q, k, f: b.node("where", b.node("not", b.node("not", f)), s, _c(b, 0.0)),
    ),
    (
        "where(lt(q, kv), score, 2.0)",
        lambda b, s, q, k, f: b.node("where", f, b.node("where", f, s, _c(b, 1.0)), _c(b, 2.0)),
    ),
    (
        "lt(q, kv)",
        lambda b, s, q, k, f: b.node("where", f, _c(b, True, BOOL), _c(b, False, BOOL)),
    ),
    (
        "lt(q, kv)",
        lambda b, s, q, k, f: b.node("ne", b.cast(f, I64), _c(b, 0, I64)),
    ),
    ("cast:f32(q)", lambda b, s, q, k, f: b.cast(b.cast(q, F32), F32)),
    ("q", lambda b, s, q, k, f: b.cast(b.cast(q, I64), I64)),
    ("cast:i64(cast:i32(q))", lambda b, s, q, k, f: b.cast(b.cast(q, I32), I64)),
    ("lt(q, kv)", lambda b, s, q, k, f: b.cast(b.cast(f, F32), BOOL)),
]


@pytest.mark.parametrize(("expected", "make"), _PATTERNS)
def test_patterns(expected: str, make: Make) -> None:
    assert _lines(make) == expected


def test_inexact_division_is_hoisted() -> None:
    def divide(b: Builder, s: int, q: int, k: int, f: int) -> int:
        return b.node("div", s, b.load(0, b.input("h")))

    assert _lines(divide) == "div(score, load(h))"
    assert _lines(divide, exact=False) == "mul(score, reciprocal(load(h)))"


def test_what_reaches_a_jump_is_never_inexact() -> None:
    """49 * (1 / 49) is below 1 in float32: a reciprocal would move the mask's edge, or a bucket."""

    def threshold(b: Builder, s: int, q: int, k: int, f: int) -> int:
        ratio = b.node("div", b.cast(q, F32), _c(b, 49.0))
        return b.node("ge", ratio, _c(b, 1.0))

    def bucket(b: Builder, s: int, q: int, k: int, f: int) -> int:
        ratio = b.node("div", b.node("log", b.cast(q, F32)), _c(b, 2.7725887))
        return b.load(0, b.cast(b.node("mul", ratio, _c(b, 4.0)), I64))

    def smooth(b: Builder, s: int, q: int, k: int, f: int) -> int:
        return b.node("where", f, b.node("div", s, _c(b, 49.0)), s)

    assert "div(" in _lines(threshold, exact=False)
    assert "div(" in _lines(bucket, exact=False)
    assert "div(" in _lines(smooth, exact=True)
    assert "div(" not in _lines(smooth, exact=False)


def test_operands_in_either_order_are_shared() -> None:
    b = Builder()
    q, k = b.input("q"), b.input("kv")
    same = b.node("eq", b.node("add", q, k), b.node("add", k, q))
    assert text(simplify(b.finish(same))) == "%0 = const bool True\nreturn %0"
