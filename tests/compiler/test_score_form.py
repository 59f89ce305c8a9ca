"""A score_mod taken apart means what it did, and the patterns that matter are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom.backends.gluon.score_form import ScoreForm, constant, score_form
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, Program
from attnloom.ir.passes.simplify import simplify
from attnloom.ir.verify import verify
from attnloom.trace.tracer import trace_score
from tests.compiler import trace_rows, trace_scores  # noqa: F401  fill the table
from tests.compiler.programs import EVERYTHING, bind, positions, programs
from tests.compiler.trace_table import KV_LEN, Q_LEN, SCORE_MODS, B, H

CPU = torch.device("cpu")
FIRST_KEY = 2


def put_together(bound: BoundProgram, form: ScoreForm, inputs: dict) -> torch.Tensor:
    """What a kernel computes from the parts, in float64."""
    scaled = {**inputs, "score": inputs["score"].double() * form.before}
    x = scaled["score"]
    if form.inner is not None:
        (x,) = interpret(replace(bound, program=form.inner), scaled, float64=True)
    if form.bias is not None:
        first = {**inputs, "kv": torch.full_like(inputs["kv"], FIRST_KEY)}
        slope, bias = interpret(replace(bound, program=form.bias), first, float64=True)
        x = x + slope * (inputs["kv"] - FIRST_KEY) + bias
    return form.outer * x


def same(bound: BoundProgram, form: ScoreForm, inputs: dict) -> None:
    for program in (form.inner, form.bias):
        assert program is None or verify(program)
    (want,) = interpret(bound, {**inputs, "score": inputs["score"].double()}, float64=True)
    shape = inputs["score"].shape
    got = put_together(bound, form, inputs)
    torch.testing.assert_close(
        got.expand(shape), want.double().expand(shape), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def grid() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.arange(B).view(B, 1, 1, 1),
        "h": torch.arange(H).view(H, 1, 1),
        "q": torch.arange(Q_LEN).view(Q_LEN, 1),
        "kv": torch.arange(KV_LEN),
        "score": torch.randn(B, H, Q_LEN, KV_LEN, generator=generator),
    }


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", list(SCORE_MODS))
def test_mods_as_users_write_them(name: str, fixed: bool) -> None:
    bound = trace_score(SCORE_MODS[name](), DType.F32, CPU)
    bound = replace(bound, program=simplify(bound.program, False))
    program = constant(bound, False) if fixed else bound.program
    same(bound, score_form(program, False), grid())


@settings(deadline=None, max_examples=60)
@given(programs(ops=EVERYTHING), st.integers(0, 99))
def test_random_programs(program: Program, seed: int) -> None:
    program = simplify(program)
    if len(program.outputs) != 1 or program.nodes[program.outputs[0]].dtype is not DType.F32:
        return
    bound, inputs = bind(program, seed), positions(seed=seed)
    form = score_form(program, False)
    if form.inner is not None and form.inner.nodes == program.nodes:
        return  # nothing was taken apart
    (want,) = interpret(bound, {**inputs, "score": inputs["score"].double()}, float64=True)
    got = put_together(bound, form, inputs)
    finite = want.isfinite() & (want.abs() < 1e6)
    got, want = torch.broadcast_tensors(got, want)
    finite = finite.expand(want.shape)
    torch.testing.assert_close(got[finite], want[finite].double(), rtol=1e-4, atol=1e-4)


def form_of(mod, exact: bool = False) -> ScoreForm:
    bound = trace_score(mod, DType.F32, CPU)
    return score_form(constant(bound, exact), exact)


def test_soft_capping_leaves_a_tanh() -> None:
    cap = 30.0
    form = form_of(lambda score, b, h, q, kv: cap * torch.tanh(score / cap))
    assert form.outer == 30.0
    assert form.before == pytest.approx(1 / 30)
    assert [n.op for n in form.inner.nodes] == ["input", "tanh"]
    assert form.bias is None


def test_alibi_leaves_nothing_but_a_bias() -> None:
    slopes = torch.ones(H)
    form = form_of(lambda score, b, h, q, kv: score - slopes[h] * (q - kv))
    assert form.inner is None
    slope, _ = form.bias.outputs
    assert not form.bias.axes[slope] & ~2  # by head alone


def test_a_factor_that_may_move_an_edge_stays() -> None:
    form = form_of(lambda score, b, h, q, kv: torch.where(score * 0.7 > 1, score * 0.7, 0.0))
    assert form.before == 1.0


def test_a_negative_factor_stays_inside() -> None:
    """Maxima of rows are those of the inner values."""
    form = form_of(lambda score, b, h, q, kv: -2.0 * torch.tanh(score))
    assert form.outer == 1.0


def test_exact_math_takes_nothing_apart() -> None:
    form = form_of(lambda score, b, h, q, kv: 30.0 * torch.tanh(score / 30.0) + q, exact=True)
    assert (form.before, form.outer, form.bias) == (1.0, 1.0, None)
