"""Levels, what is stored between them, loops, and affine forms."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.ir.builder import Builder, extract
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, DType, Program, TensorSpec
from attnloom.ir.passes.affine import Affine, affine
from attnloom.ir.passes.placement import Level, loop_body, place
from tests.compiler.programs import EVERYTHING, bind, positions, programs


def test_alibi_is_placed_on_four_levels() -> None:
    b = Builder([TensorSpec(torch.float32, 1), TensorSpec(torch.float32, 2)], [DType.F32])
    slope = b.node("mul", b.load(0, b.input("h")), b.number(0, DType.F32))
    row = b.load(1, b.input("b"), b.input("q"))
    column = b.cast(b.input("kv"), DType.F32)
    product = b.node("mul", slope, b.node("sub", column, row))
    program = b.finish(b.node("add", b.input("score"), product))
    placement = place(program)
    ops = {level: [program.nodes[i].op for i in nodes] for level, nodes in placement.stored.items()}
    assert ops == {Level.HEAD: ["mul"], Level.ROW: ["load"], Level.COLUMN: ["cast"]}
    inputs = {
        level: [program.nodes[i].attr for i in nodes if program.nodes[i].op == "input"]
        for level, nodes in placement.computed.items()
    }
    assert inputs == {
        Level.HEAD: ["h"],
        Level.ROW: ["b", "q"],
        Level.COLUMN: ["kv"],
        Level.SCORE: ["score"],
    }


def test_nodes_of_a_loop_are_never_stored() -> None:
    b = Builder([TensorSpec(torch.float32, 2), TensorSpec(torch.float32, 1)], reductions=[(0, 1)])
    r = b.input("r0")
    head = b.load(1, b.input("h"))
    body = b.node("mul", b.load(0, b.input("q"), r), head)
    row = b.reduce("sum", Axes.R0, body)
    program = b.finish(b.node("add", b.input("score"), row))
    placement = place(program)
    (loop,) = placement.loops.values()
    assert [program.nodes[i].op for i in loop.body] == ["input", "load", "mul"]
    assert placement.stored[Level.ROW] == (loop.reduce,)
    assert [program.nodes[i].op for i in placement.stored[Level.HEAD]] == ["load"]
    assert loop_body(program, *program.outputs) == ()


@settings(deadline=None, max_examples=100)
@given(programs(ops=EVERYTHING))
def test_every_operand_is_at_hand(program: Program) -> None:
    """A level computes from its own values, stored values of lower levels and leaves, in order."""
    placement = place(program)
    below = {
        Level.HEAD: (),
        Level.ROW: (Level.HEAD,),
        Level.COLUMN: (Level.HEAD,),
        Level.SCORE: (Level.HEAD, Level.ROW, Level.COLUMN),
    }
    for level, lower in below.items():
        at_hand = {i for other in lower for i in placement.stored[other]}
        for index in placement.computed[level]:
            node = program.nodes[index]
            loop = placement.loops.get(index)
            steps = set(loop.body) if loop else set()
            for arg in node.args:
                assert arg in at_hand | steps, (level, index, arg)
            for step in steps:
                operands = set(program.nodes[step].args)
                if program.nodes[step].op != "reduce":
                    assert operands <= at_hand | steps, (level, index, step)
            at_hand.add(index)
        if level is Level.SCORE:
            assert set(program.outputs) <= at_hand


def _form(op: str, *more: str) -> Affine | None:
    b = Builder([TensorSpec(torch.int64, 1)], [DType.I64])
    q, kv, two = b.input("q"), b.input("kv"), b.const(2, DType.I64)
    number, loaded = b.number(0, DType.I64), b.load(0, b.input("h"))
    nodes = {
        "relative": lambda: b.node("sub", q, kv),
        "scaled": lambda: b.node("mul", two, b.node("add", b.node("sub", kv, q), two)),
        "offset": lambda: b.node("sub", b.node("add", q, number), loaded),
        "cancel": lambda: b.node("sub", b.node("add", q, number), number),
        "product": lambda: b.node("mul", q, kv),
        "quotient": lambda: b.node("floordiv", b.node("sub", q, kv), two),
        "doubled": lambda: b.node("shl", b.node("neg", q), two),
        "gather": lambda: b.load(0, q),
        "narrow": lambda: b.node("sub", b.cast(q, DType.I32), b.cast(kv, DType.I32)),
        "truncated": lambda: b.cast(b.node("sub", q, kv), DType.I32),
    }
    program = b.finish(nodes[op]())
    return affine(program)[program.outputs[0]]


def test_affine_forms() -> None:
    assert _form("relative") == Affine(1, -1)
    assert _form("scaled") == Affine(-2, 2, (), 4)
    assert _form("cancel") == Affine(1, 0)
    assert _form("doubled") == Affine(-4, 0)
    assert _form("narrow") == Affine(1, -1)
    offset = _form("offset")
    assert offset is not None
    assert sorted(f for f, _ in offset.terms) == [-1, 1]
    for name in ("product", "quotient", "gather", "truncated"):
        assert _form(name) is None, name


_AFFINE_OPS = ("add", "sub", "mul", "neg", "shl", "cast", "max")


@settings(deadline=None, max_examples=100)
@given(programs(ops=_AFFINE_OPS, result=DType.I64), st.integers(0, 99))
def test_affine_forms_have_the_value(program: Program, seed: int) -> None:
    bound, inputs = bind(program, seed), positions(seed=seed)
    for index, form in enumerate(affine(program)):
        if form is None:
            continue
        nodes = (index, *(node for _, node in form.terms))
        part = BoundProgram(extract(program, *nodes), bound.tensors, bound.numbers)
        value, *terms = interpret(part, inputs)
        expected = inputs["q"] * _wrap(form.q) + inputs["kv"] * _wrap(form.kv)
        expected = expected + _wrap(form.constant)
        for (factor, _), term in zip(form.terms, terms, strict=True):
            expected = expected + term.to(torch.int64) * _wrap(factor)
        assert torch.equal(expected.to(value.dtype).expand(2, 3, 6, 7), value.expand(2, 3, 6, 7))


def _wrap(value: int) -> int:
    """To 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
