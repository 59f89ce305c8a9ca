"""Generated C++: its exact text for a few mods, and what must never reach it.

To accept a changed text, look at the difference and write the new one:
    UPDATE_GOLDEN=1 python -m pytest tests/compiler/test_emit_text.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnloom.backends.cpu.emit import emit_fragments
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, Program
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.tracer import trace_mask, trace_score
from tests.compiler.fragment_driver import Driver, Shape
from tests.compiler.programs import EXACT, bind, programs

GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")


def emit(score=None, mask=None, **options) -> str:
    traced = None if score is None else trace_score(score, DType.F32, CPU).program
    hidden = None if mask is None else trace_mask(mask, CPU).program
    settled = {"real": "float", "wide_ints": False, "exact_math": False, "gradient": False}
    simple = [None if p is None else simplify(p, False) for p in (traced, hidden)]
    return emit_fragments(simple[0], simple[1], **(settled | options)).text


def golden_cases() -> dict[str, str]:
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    bias = torch.zeros(2, 9, requires_grad=True)
    doc = torch.zeros(2, 9, dtype=torch.int64)
    rows = torch.zeros(2, 4)
    cap, window = 20.0, 256
    return {
        "causal_window": emit(mask=lambda b, h, q, kv: (q >= kv) & (q - kv <= window)),
        "documents": emit(mask=lambda b, h, q, kv: doc[b, q] == doc[b, kv]),
        "alibi": emit(lambda s, b, h, q, kv: s + slopes[h] * (kv - q), gradient=True),
        "softcap": emit(lambda s, b, h, q, kv: cap * torch.tanh(s / cap), gradient=True),
        "relative_bias": emit(lambda s, b, h, q, kv: s + bias[h, q - kv + 4], gradient=True),
        "row_reduction": emit(lambda s, b, h, q, kv: s * (rows[h] * s).sum()),
    }


@pytest.mark.parametrize("name", list(golden_cases()))
def test_text(name: str) -> None:
    text, path = golden_cases()[name], GOLDEN / f"cpu_{name}.cpp"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_alibi_is_two_vector_operations_and_hoists_the_slope() -> None:
    body = emit(lambda s, b, h, q, kv: s + torch.ones(2)[h] * (kv - q)).split("score_mod")[1]
    assert "load_one" not in body.split("mask")[0]
    assert "convert" not in body.split("mask")[0].lower()


def test_approximations_stop_where_a_small_error_would_jump() -> None:
    def bucket(s, b, h, q, kv):
        return s + torch.floor(torch.tanh(s) * 7.0) + torch.tanh(s + 1)

    body = emit(bucket)
    assert body.count("v_tanh_exact(") == 1 and body.count("v_tanh(") == 1
    assert "v_tanh(" not in emit(bucket, exact_math=True)


def test_names_and_strings_of_the_user_stay_out() -> None:
    evil_name_9f = torch.ones(3)

    def score_evil_9f(s, b, h, q_evil_9f, kv):
        return s + evil_name_9f[q_evil_9f] * 2

    text = emit(score_evil_9f, gradient=True)
    assert "evil" not in text
    assert not re.search(r"[\"'\\]", text)


def test_equal_structure_gives_equal_text() -> None:
    texts = {emit(lambda s, b, h, q, kv, n=n: s * n) for n in (2.0, 3.5)}
    assert len(texts) == 1


def test_forward_text_has_no_gradient() -> None:
    assert "score_grad" not in emit(lambda s, b, h, q, kv: s * 2)
    assert "HAS_SCORE 0" in emit() and "HAS_MASK 0" in emit()


SHAPE = Shape(2, 3, 6, 7)
RANDOM = settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("kind", ["score", "mask"])
@given(data=st.data())
@RANDOM
def test_random_programs(kind: str, data: st.DataObject) -> None:
    """Twelve programs a compilation, in 64-bit lanes, where integers are torch's."""
    result = DType.BOOL if kind == "mask" else DType.F32
    strategy = programs(ops=EXACT, result=result, score=kind == "score")
    drawn: list[Program] = [data.draw(strategy) for _ in range(12)]
    driver = Driver(kind, drawn, wide_ints=True, exact_math=True)
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(SHAPE.B, SHAPE.H, SHAPE.Q_LEN, SHAPE.KV_LEN, generator=generator)
    for number, program in enumerate(drawn):
        bound = bind(program, number)
        inputs = SHAPE.positions() | ({"score": score} if kind == "score" else {})
        (want,) = interpret(bound, inputs)
        check(driver, number, bound, score, want)


def check(
    driver: Driver, number: int, bound: BoundProgram, score: torch.Tensor, want: torch.Tensor
) -> None:
    if driver.kind == "mask":
        got, _ = driver.mask(number, bound, SHAPE)
        assert torch.equal(got, want.expand_as(got)), bound.program
        return
    got, _ = driver.score(number, bound, score, SHAPE)
    want = want.expand_as(got)
    same = (got == want) | (got.isnan() & want.isnan())
    close = (got - want).abs() <= 1e-5 * want.abs() + 1e-6
    assert (same | close).all(), (bound.program, got[~(same | close)], want[~(same | close)])
