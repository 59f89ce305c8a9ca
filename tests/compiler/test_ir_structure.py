"""Builder, verifier, printer and interpreter of programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.ir.builder import Builder, extract
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, DType, Node, Program, TensorSpec
from attnloom.ir.op_types import ProgramError
from attnloom.ir.passes.gradient import gradient
from attnloom.ir.text import text
from attnloom.ir.verify import verify
from tests.compiler.programs import bind, positions, programs

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


def _alibi() -> Program:
    b = Builder([TensorSpec(torch.float32, 1, True)])
    distance = b.cast(b.node("sub", b.input("kv"), b.input("q")), F32)
    return b.finish(
        b.node("add", b.input("score"), b.node("mul", b.load(0, b.input("h")), distance))
    )


def _pair_bias() -> Program:
    """tanh of a dot product of two captured rows, plus a run-time number."""
    b = Builder([TensorSpec(torch.bfloat16, 2, True)], [F32], [(0, 1)])
    r = b.input("r0")
    product = b.node("mul", b.load(0, b.input("q"), r), b.load(0, b.input("kv"), r))
    bias = b.node("tanh", b.reduce("sum", Axes.R0, product))
    scaled = b.node("mul", bias, b.number(0, F32))
    return b.finish(b.node("sub", b.input("score"), scaled))


def _window() -> Program:
    b = Builder((), [I64])
    q, kv = b.input("q"), b.input("kv")
    near = b.node("le", b.node("sub", q, kv), b.number(0, I64))
    return b.finish(b.node("and", b.node("ge", q, kv), near))


ALIBI = """\
tensor t0: float32 rank 1 grad
%0 = input i64 kv                   # kv
%1 = input i64 q                    # q
%2 = sub i64 %0 %1                  # q kv
%3 = cast f32 %2                    # q kv
%4 = input f32 score                # b h q kv
%5 = input i64 h                    # h
%6 = load f32 t0[%5]                # h
%7 = mul f32 %6 %3                  # h q kv
%8 = add f32 %4 %7                  # b h q kv
return %8"""

PAIR_BIAS = """\
tensor t0: bfloat16 rank 2 grad
number n0: f32
length r0: t0 dim 1
%0 = input i64 r0                   # r0
%1 = input i64 q                    # q
%2 = load f32 t0[%1, %0]            # q r0
%3 = input i64 kv                   # kv
%4 = load f32 t0[%3, %0]            # kv r0
%5 = mul f32 %2 %4                  # q kv r0
%6 = reduce f32 sum r0 %5           # q kv
%7 = tanh f32 %6                    # q kv
%8 = number f32 n0
%9 = mul f32 %7 %8                  # q kv
%10 = input f32 score               # b h q kv
%11 = sub f32 %10 %9                # b h q kv
return %11"""

WINDOW = """\
number n0: i64
%0 = input i64 q                    # q
%1 = input i64 kv                   # kv
%2 = sub i64 %0 %1                  # q kv
%3 = number i64 n0
%4 = le bool %2 %3                  # q kv
%5 = ge bool %0 %1                  # q kv
%6 = and bool %5 %4                 # q kv
return %6"""

ALIBI_GRADIENT = """\
tensor t0: float32 rank 1 grad
%0 = input i64 kv                   # kv
%1 = input i64 q                    # q
%2 = sub i64 %0 %1                  # q kv
%3 = cast f32 %2                    # q kv
%4 = input i64 h                    # h
%5 = input f32 dscore               # b h q kv
%6 = mul f32 %3 %5                  # b h q kv
return %5 %4 %6"""


def test_text_is_stable() -> None:
    assert text(verify(_alibi(), "score")) == ALIBI
    assert text(verify(_pair_bias(), "score")) == PAIR_BIAS
    assert text(verify(_window(), "mask")) == WINDOW
    assert text(verify(gradient(_alibi()).program, "gradient")) == ALIBI_GRADIENT


def test_digest_tells_structures_apart() -> None:
    assert _alibi().digest == _alibi().digest
    frozen = replace(_alibi(), tensors=(TensorSpec(torch.float32, 1, False),))
    assert len({_alibi().digest, frozen.digest, _window().digest, _pair_bias().digest}) == 4


def test_programs_that_differ_in_the_sign_of_a_zero_were_equal() -> None:
    """What is cached by program, a fragment say, was given for the other."""
    plus, minus = (Program((Node("const", (), F32, zero),), (0,)) for zero in (0.0, -0.0))
    assert plus != minus
    assert len({plus, minus, replace(plus)}) == 2


def test_builder_shares_equal_nodes_only() -> None:
    b = Builder()
    assert b.node("add", b.input("q"), b.input("kv")) == b.node("add", b.input("q"), b.input("kv"))
    assert b.const(float("nan"), F32) == b.const(float("nan"), F32)
    constants = [
        b.const(0.0, F32),
        b.const(-0.0, F32),
        b.const(0, I64),
        b.const(False, BOOL),
        b.const(0.0, DType.F64),
    ]
    assert len(set(constants)) == 5


def test_builder_wraps_integer_constants() -> None:
    b = Builder()
    wrapped = [
        b.nodes[b.const(value, dtype)].attr
        for value, dtype in ((300, DType.U8), (-1, DType.U8), (128, DType.I8), (2**31, DType.I32))
    ]
    assert wrapped == [44, 255, -128, -(2**31)]


def test_finish_drops_dead_nodes_and_keeps_slots() -> None:
    b = Builder([TensorSpec(torch.float32, 1), TensorSpec(torch.int64, 1)])
    b.load(0, b.input("h"))
    program = b.finish(b.load(1, b.input("q")))
    assert text(program).splitlines()[2:] == [
        "%0 = input i64 q                    # q",
        "%1 = load i64 t1[%0]                # q",
        "return %1",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.node("sort", 0), "no operation is called 'sort'"),
        (lambda b: b.node("add", 0), "add takes 2 operands, got 1"),
        (lambda b: b.input("k_idx"), "no input is called 'k_idx'"),
        (lambda b: b.load(0, b.input("q")), "tensor 0 has rank 2, got 1 indices"),
        (lambda b: b.load(1, b.input("q")), "tensor slot 1 of 1"),
        (lambda b: b.load(0, b.input("q"), b.input("score")), "an index must be an integer"),
        (lambda b: b.number(0, F32), "number slot 0 of 0"),
        (lambda b: b.reduce("mean", Axes.R0, b.input("score")), "no reduction is called 'mean'"),
        (lambda b: b.reduce("sum", Axes.R1, b.input("score")), "not one of 1 reduction axes"),
        (lambda b: b.reduce("any", Axes.R0, b.input("score")), "cannot reduce f32 by any"),
        (lambda b: b.node("add", b.input("q"), b.input("score")), "operands differ in type"),
    ],
)
def test_builder_rejects(make, message: str) -> None:
    b = Builder([TensorSpec(torch.float32, 2)], (), [(0, 1)])
    b.input("q")
    with pytest.raises(ProgramError, match=message):
        make(b)


def _edit(program: Program, index: int, **changes: object) -> Program:
    nodes = list(program.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(program, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("broken", "purpose", "message"),
    [
        (_edit(_alibi(), 7, dtype=DType.F64), None, "%7 = mul should be"),
        (_edit(_alibi(), 7, args=(6, 8)), None, "not all of them earlier"),
        (_edit(_alibi(), 7, args=(6,)), None, "takes 2 operands"),
        (_edit(_alibi(), 6, attr=3), None, "tensor slot 3 of 1"),
        (_edit(_alibi(), 1, attr="kv"), None, "%1 repeats %0"),
        (_edit(_alibi(), 5, dtype=F32), None, "input h cannot be f32"),
        (_edit(_alibi(), 8, args=(4, 4)), None, r"%7 \(mul\) is dead"),
        (replace(_alibi(), outputs=(99,)), None, "outputs"),
        (replace(_alibi(), outputs=()), None, "no outputs"),
        (_alibi(), "mask", "a mask program cannot return f32"),
        (_window(), "score", "a score program cannot return bool"),
        (gradient(_alibi()).program, "score", "one output"),
        (replace(_window(), numbers=(F32,)), None, "float number 0 read as i64"),
        (replace(_pair_bias(), reductions=((0, 2),)), None, "reduction over dimension 2"),
        (replace(_pair_bias(), reductions=()), None, "no reduction gives r0 its length"),
        (
            Program((Node("const", (), DType.U8, 300),), (0,)),
            None,
            "300 is outside u8",
        ),
        (Program((Node("const", (), F32, 1),), (0,)), None, "f32 cannot hold 1"),
    ],
)
def test_verify_rejects(broken: Program, purpose: str | None, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify(broken, purpose)


def test_verify_accepts_nan_constants() -> None:
    b = Builder()
    verify(b.finish(b.const(float("nan"), F32)), "score")


@settings(deadline=None, max_examples=60)
@given(programs(), st.integers(0, 99))
def test_random_programs_are_valid_and_extract_keeps_values(program: Program, seed: int) -> None:
    verify(program, "score")
    last = len(program.nodes) - 1
    part = extract(program, last)
    bound = bind(program, seed)
    everything = replace(bound, program=replace(program, outputs=(last,)))
    inputs = positions(seed=seed)
    alone = interpret(replace(bound, program=part), inputs)[0]
    torch.testing.assert_close(
        alone, interpret(everything, inputs)[0], rtol=0, atol=0, equal_nan=True
    )


def test_loads_wrap_clamp_and_survive_empty_tensors() -> None:
    b = Builder([TensorSpec(torch.float16, 1)])
    program = b.finish(b.load(0, b.node("sub", b.input("q"), b.input("kv"))))
    inputs = {"q": torch.arange(6), "kv": torch.tensor(3)}
    table = torch.tensor([1.0, 2.0], dtype=torch.float16)
    (value,) = interpret(BoundProgram(program, (table,)), inputs)
    assert value.dtype is torch.float32
    assert value.tolist() == [1.0, 1.0, 2.0, 1.0, 2.0, 2.0]  # indices -3 -2 -1 0 1 2
    (empty,) = interpret(BoundProgram(program, (table[:0],)), inputs)
    assert empty.tolist() == [0.0] * 6


def test_reductions_over_nothing_give_the_neutral_element() -> None:
    for kind, expected in (("sum", 0.0), ("prod", 1.0), ("max", -torch.inf), ("min", torch.inf)):
        b = Builder([TensorSpec(torch.float32, 2)], (), [(0, 1)])
        program = b.finish(b.reduce(kind, Axes.R0, b.load(0, b.input("q"), b.input("r0"))))
        inputs = {"q": torch.arange(3)}
        (value,) = interpret(BoundProgram(program, (torch.zeros(3, 0),)), inputs)
        assert value.flatten().tolist() == [expected] * value.numel()


def test_interpret_matches_plain_torch() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    inputs = {
        "q": torch.arange(5)[:, None],
        "kv": torch.arange(5)[None],
        "score": torch.randn(5, 5, dtype=torch.float64),
    }
    program = _pair_bias()
    (value,) = interpret(BoundProgram(program, (x,), (0.1,)), inputs, float64=True)
    torch.testing.assert_close(value, inputs["score"] - 0.1 * torch.tanh(x @ x.T))
    assert value.dtype is torch.float64
