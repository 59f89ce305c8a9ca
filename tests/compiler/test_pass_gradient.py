"""Reverse mode against autograd through the interpreter, on fixed and random programs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.ir.builder import Builder
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, DType, Program, TensorSpec
from attnloom.ir.passes.gradient import Gradient, gradient
from attnloom.ir.verify import verify
from tests.compiler.programs import SMOOTH, bind, positions, programs

Tensor = torch.Tensor


def _autograd(bound: BoundProgram, inputs: dict[str, Tensor], dscore: Tensor) -> list[Tensor]:
    score = inputs["score"].double().requires_grad_()
    tensors = tuple(
        t.double().requires_grad_() if spec.requires_grad else t
        for t, spec in zip(bound.tensors, bound.program.tensors, strict=True)
    )
    leaves = [score] + [t for t in tensors if t.requires_grad]
    fresh = BoundProgram(bound.program, tensors, bound.numbers)
    out = interpret(fresh, inputs | {"score": score}, float64=True)[0].expand(dscore.shape)
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(out, leaves, dscore, allow_unused=True, materialize_grads=True))


def _ours(
    reverse: Gradient, bound: BoundProgram, inputs: dict[str, Tensor], dscore: Tensor
) -> list[Tensor]:
    program = reverse.program
    inputs = inputs | {"dscore": dscore}
    values = interpret(BoundProgram(program, bound.tensors, bound.numbers), inputs, float64=True)
    grads = {
        slot: torch.zeros(t.shape, dtype=torch.float64)
        for slot, t in enumerate(bound.tensors)
        if program.tensors[slot].requires_grad
    }
    inner = len(program.reductions)
    lanes = dscore.shape + tuple(bound.tensors[slot].shape[dim] for slot, dim in program.reductions)
    at = 1
    for contribution in reverse.contributions:
        end = at + len(contribution.index)
        full = [
            v if program.axes[i] & ~Axes.ALL else v.reshape(*v.shape, *(1,) * inner)
            for i, v in zip(program.outputs[at : end + 1], values[at : end + 1], strict=True)
        ]
        shape = [
            n if i < 4 or contribution.axes & (Axes.R0 << (i - 4)) else 1
            for i, n in enumerate(lanes)
        ]
        *index, value = (v.expand(shape) for v in full)
        sizes = bound.tensors[contribution.slot].shape
        wrapped = tuple(
            torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in zip(index, sizes, strict=True)
        )
        grads[contribution.slot].index_put_(wrapped, value, accumulate=True)
        at = end + 1
    assert at == len(values)
    return [values[0].double().expand(dscore.shape), *grads.values()]


def _check(bound: BoundProgram, seed: int = 0) -> Gradient:
    inputs = positions(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    dscore = torch.randn(inputs["score"].shape, generator=generator, dtype=torch.float64)
    reverse = gradient(bound.program)
    verify(reverse.program, "gradient")
    expected = _autograd(bound, inputs, dscore)
    for found, want in zip(_ours(reverse, bound, inputs, dscore), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-8)
    return reverse


@settings(deadline=None, max_examples=150)
@given(programs(ops=SMOOTH, smooth=True), st.integers(0, 99))
def test_random_programs(program: Program, seed: int) -> None:
    _check(bind(program, seed), seed)


def _tensors(*shapes: tuple[int, ...]) -> tuple[list[TensorSpec], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    specs = [TensorSpec(torch.float32, len(shape), True) for shape in shapes]
    return specs, tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_dot_product_inside_a_reduction() -> None:
    """x[q] . y[kv], scaled by a head's factor that is used inside the loop."""
    specs, tensors = _tensors((6, 4), (7, 4), (3,))
    b = Builder(specs, reductions=[(0, 1)])
    r = b.input("r0")
    scale = b.load(2, b.input("h"))
    product = b.node("mul", b.load(0, b.input("q"), r), b.load(1, b.input("kv"), r))
    dot = b.reduce("sum", Axes.R0, b.node("mul", product, scale))
    program = b.finish(b.node("add", b.input("score"), b.node("tanh", dot)))
    reverse = _check(BoundProgram(program, tensors))
    axes = {c.slot: c.axes for c in reverse.contributions}
    assert axes == {0: Axes.R0, 1: Axes.R0, 2: Axes.NONE}


def test_value_used_at_every_step_counts_every_step() -> None:
    """sum over r of (x[r] + bias[h]): bias counts once a step although its adjoint has no r."""
    specs, tensors = _tensors((5,), (3,))
    b = Builder(specs, reductions=[(0, 0)])
    body = b.node("add", b.load(0, b.input("r0")), b.load(1, b.input("h")))
    constant = b.reduce("sum", Axes.R0, b.load(1, b.input("h")))
    total = b.node("add", b.reduce("sum", Axes.R0, body), constant)
    _check(BoundProgram(b.finish(b.node("mul", b.input("score"), total)), tensors))


def test_extrema_share_ties_and_products_survive_zeros() -> None:
    specs, _ = _tensors((3, 5))
    rows = torch.tensor(
        [[1.0, 3.0, 3.0, -2.0, -2.0], [0.0, 2.0, 4.0, 1.0, 5.0], [0.0, 0.0, 4.0, 1.0, 5.0]]
    )
    for kind in ("max", "min", "prod"):
        b = Builder(specs, reductions=[(0, 1)])
        reduced = b.reduce(kind, Axes.R0, b.load(0, b.input("h"), b.input("r0")))
        program = b.finish(b.node("mul", b.input("score"), reduced))
        _check(BoundProgram(program, (rows,)))


def test_nested_reductions() -> None:
    specs, tensors = _tensors((4,), (4, 5))
    b = Builder(specs, reductions=[(0, 0), (1, 1)])
    inner = b.reduce("sum", Axes.R1, b.load(1, b.input("r0"), b.input("r1")))
    outer = b.reduce("sum", Axes.R0, b.node("mul", inner, b.load(0, b.input("r0"))))
    _check(BoundProgram(b.finish(b.node("mul", b.input("score"), outer)), tensors))


def test_loads_of_one_slot_are_separate() -> None:
    specs, tensors = _tensors((7,))
    b = Builder(specs)
    both = b.node("mul", b.load(0, b.input("q")), b.load(0, b.input("kv")))
    program = b.finish(b.node("add", b.input("score"), both))
    reverse = _check(BoundProgram(program, tensors))
    assert [c.slot for c in reverse.contributions] == [0, 0]


def test_wrapped_and_clamped_indices() -> None:
    specs, tensors = _tensors((4,))
    b = Builder(specs)
    program = b.finish(b.load(0, b.node("sub", b.input("q"), b.input("kv"))))
    reverse = _check(BoundProgram(program, tensors))
    assert reverse.program.nodes[reverse.program.outputs[0]].attr == 0.0


def test_what_has_no_gradient_leaves_none() -> None:
    """Integers, a tensor that does not require grad and a score that is compared only."""
    b = Builder([TensorSpec(torch.float32, 1)])
    positive = b.cast(b.node("gt", b.input("score"), b.const(0.0, DType.F32)), DType.F32)
    program = b.finish(b.node("add", positive, b.load(0, b.input("h"))))
    reverse = gradient(program)
    assert not reverse.contributions
    assert [n.op for n in reverse.program.nodes] == ["const"]
