"""Every mod of the table, traced and interpreted, against calling it on one score at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.verify import verify
from attnloom.trace import captures
from attnloom.trace.tracer import trace_mask, trace_score
from tests.compiler import trace_masks, trace_rows, trace_scores  # noqa: F401  fill the table
from tests.compiler.trace_table import KV_LEN, MASK_MODS, Q_LEN, SCORE_MODS, B, H

CPU = torch.device("cpu")
SHAPE = (B, H, Q_LEN, KV_LEN)


def _positions() -> dict[str, torch.Tensor]:
    names = ("b", "h", "q", "kv")
    return {
        name: torch.arange(size).reshape([-1 if i == place else 1 for i in range(4)])
        for place, (name, size) in enumerate(zip(names, SHAPE, strict=True))
    }


def _scores(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7), dtype=dtype)


def _directly(mod: Any, scores: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The mod called once a score, on tensors without dimensions."""
    values = torch.empty(SHAPE, dtype=dtype)
    for place in itertools.product(*(range(n) for n in SHAPE)):
        position = [torch.tensor(i) for i in place]
        result = mod(*position) if scores is None else mod(scores[place], *position)
        values[place] = torch.as_tensor(result).to(dtype)
    return values


def _interpreted(bound: BoundProgram, scores: torch.Tensor | None) -> torch.Tensor:
    verify(bound.program)
    inputs = _positions() | ({} if scores is None else {"score": scores})
    (output,) = interpret(bound, inputs)
    return output.expand(SHAPE)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_agrees_with_direct_calls(name: str) -> None:
    mod = MASK_MODS[name]()
    bound = trace_mask(mod, CPU)
    actual = _interpreted(bound, None)
    assert actual.dtype is torch.bool
    assert torch.equal(actual, _directly(mod, None, torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCORE_MODS)
@torch.no_grad()
def test_score_agrees_with_direct_calls(name: str, dtype: torch.dtype) -> None:
    mod, scores = SCORE_MODS[name](), _scores(dtype)
    bound = trace_score(mod, DType.of(dtype), CPU)
    actual = _interpreted(bound, scores)
    assert actual.dtype is dtype
    expected = _directly(mod, scores, dtype)
    # Parts of a float64 program are float32, and their sums may be ordered differently.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("name", [*SCORE_MODS, *MASK_MODS])
def test_a_new_closure_has_the_same_structure(name: str) -> None:
    """Each call of the factory makes new functions and tensors; the fast path starts empty."""
    digests = set()
    for _ in range(2):
        captures.clear()
        if name in SCORE_MODS:
            bound = trace_score(SCORE_MODS[name](), DType.F32, CPU)
        else:
            bound = trace_mask(MASK_MODS[name](), CPU)
        digests.add(bound.program.digest)
    assert len(digests) == 1


@pytest.mark.parametrize("name", [*SCORE_MODS, *MASK_MODS])
def test_a_repeated_trace_binds_the_same(name: str) -> None:
    """By template or by tracing again, the second result is the first."""
    if name in SCORE_MODS:
        mod = SCORE_MODS[name]()
        first, second = (trace_score(mod, DType.F32, CPU) for _ in range(2))
    else:
        mod = MASK_MODS[name]()
        first, second = (trace_mask(mod, CPU) for _ in range(2))
    assert first.program == second.program
    assert repr(first.numbers) == repr(second.numbers)
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert a is b or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
