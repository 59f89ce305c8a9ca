"""Rows whose maxima begin at the least finite number (FLOOR), beside those that ask whether they
have seen a key: the functions of the forward, run as Python on numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.gluon import forward_math
from attnloom.backends.gluon.score_form import constant
from attnloom.backends.triton.fields import may_be_huge
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_score

INF, NAN, LEAST = math.inf, math.nan, torch.finfo(torch.float32).min
SCORES = [-INF, -INF, -INF, LEAST, -1e38, -1e30, -(2.0**100), -3.0, 0.0, 2.5, 1e30, 3e38, NAN, INF]


def _row_max(s: torch.Tensor, _: Any) -> torch.Tensor:
    """NaN is left out, as by the device's maximum."""
    found = s.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).amax(1)
    return torch.where(s.isnan().all(1), NAN, found)


STAND_INS = {
    "gl": SimpleNamespace(
        maximum=torch.fmax,
        where=torch.where,
        sum=lambda x, dim: x.sum(dim),
        log=torch.log,
    ),
    "row_max": _row_max,
    "exp2_fast": torch.exp2,
    "LN_2": math.log(2),
    "LEAST": LEAST,
}


def results(
    scores: torch.Tensor, base: float, floor: bool, huge: bool = False
) -> dict[str, torch.Tensor]:
    """Of scores [steps, rows, keys]."""
    cfg = SimpleNamespace(
        HAS_BIAS=False, STRIPS=False, MAY_MASK=True, HAS_SCORE=True, FLOOR=floor, BY_LANE=False,
        HUGE=huge,
    )  # fmt: skip
    m_i = torch.full(scores.shape[1:2], LEAST if floor else -INF)
    l_i, acc = torch.zeros_like(m_i), torch.zeros_like(m_i)
    with mock.patch.dict(vars(forward_math), STAND_INS):
        for step in range(len(scores)):
            p, m_i, l_i, alpha = forward_math.softmax_step.fn(
                scores[step], 0.0, m_i, l_i, base, None, cfg
            )
            acc = acc * alpha + (p * torch.arange(1.0, p.size(1) + 1)).sum(1)
        lse, natural = forward_math.log_sums.fn(m_i, l_i, base, cfg)
    return {"out": acc, "sums": l_i, "lse": lse, "maxima": natural}


@pytest.mark.parametrize("base", [1.0, 0.18, 1e-3])
def test_the_same_results_bit_for_bit(base: float) -> None:
    draw = torch.Generator().manual_seed(0)
    steps, rows, keys = 4, 20_000, 4
    picked = torch.randint(0, len(SCORES), (steps, rows, keys), generator=draw)
    scores = torch.tensor(SCORES)[picked]
    # rows with nothing, with nothing for several steps, and with few kinds of scores
    scores[:, : rows // 10] = -INF
    scores[:2, : rows // 5] = -INF
    scores[:, rows // 2 :] = scores[:, rows // 2 :].nan_to_num(nan=-INF, posinf=0.5, neginf=-INF)
    asked, begun = results(scores, base, False), results(scores, base, True)
    # a row with NaN has no maximum
    for found in (asked, begun):
        found["maxima"] = torch.where(found["sums"].isnan(), NAN, found["maxima"])
    for name, a in asked.items():
        b = begun[name]
        same = (a == b) | (a.isnan() & b.isnan())
        assert same.all(), (name, a[~same][0], b[~same][0], scores[:, ~same][:, 0])
    empty = (scores == -INF).all(2).all(0)
    assert empty.any()
    assert (begun["lse"][empty] == -INF).all()
    assert (begun["maxima"][empty] == -INF).all()
    assert (begun["out"][empty] == 0).all()


@pytest.mark.parametrize("lowest", [LEAST, -1e31, -1e9, -2e9, 3e38, 1e10])
def test_rows_of_scores_as_large_as_numbers_go(lowest: float) -> None:
    """A mask of finfo.min that is added to scores, as others write masks, made NaN of each row that
    met a tile of nothing else."""
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 64, 8, generator=draw)
    scores[0, :48] = scores[1:, 16:32] = lowest  # at first, for good, then something else
    scores[1, 32:40, ::2] = lowest
    found = results(scores, 1.4426950408889634, False, huge=True)
    exact = scores.double().permute(1, 0, 2).flatten(1)
    weights = torch.softmax(exact, 1) @ torch.arange(1.0, 9.0).double().repeat(3)
    torch.testing.assert_close(found["out"] / found["sums"], weights.float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found["lse"], torch.logsumexp(exact, 1).float(), rtol=1e-5, atol=0)


def lowest_where(s, b, h, q, kv):
    return torch.where(q % 3 == 0, LEAST, s)


BIAS = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("score_mod", "huge"),
    [
        (lambda s, b, h, q, kv: 20 * torch.tanh(s / 20), False),
        (lambda s, b, h, q, kv: s - 0.1 * torch.abs(q - kv), False),
        (lambda s, b, h, q, kv: torch.where(q > kv, s, 0.5 * s), False),
        (lowest_where, True),
        (lambda s, b, h, q, kv: s + BIAS[q, kv], True),
        (lambda s, b, h, q, kv: torch.exp(s), True),
        (lambda s, b, h, q, kv: torch.where(q > kv, s, -INF), True),
    ],
)
def test_score_mods_that_stay_small_cost_nothing(score_mod: Any, huge: bool) -> None:
    score = trace_score(score_mod, DType.F32, torch.device("cpu"))
    program = constant(score, False)  # as of the numbers that a process meets first
    assert may_be_huge(program) == huge
