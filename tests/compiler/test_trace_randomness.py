"""Random numbers of Python and numpy in a mod were frozen, or drawn again at every trace; they are
refused as torch's are."""

from __future__ import annotations

import functools
import random
from random import gauss
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnloom.errors import TraceError
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_mask, trace_score

_CPU = torch.device("cpu")
_WHY = "; kernels recompute a mod in the backward, so that it must give the same value every time."
rng = np.random.default_rng(0)
mine = random.Random(0)
tools = SimpleNamespace(draws=SimpleNamespace(old=np.random.RandomState(0)))
draw = np.random.normal


def _helper() -> float:
    return 1 + random.random()


def _imports(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    from random import uniform

    return score + uniform(0, 1)


def _imports_numpy(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    import numpy.random as chance

    return score + chance.rand()


class _Layer:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def noise(self) -> float:
        return self.rng.random()

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.noise()

    __call__ = score_mod


def _bound(generator: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * generator.random()


def _within(draws: Any) -> Any:
    return lambda s, b, h, q, kv: s + draws()


DRAWS: list[tuple[Any, str]] = [
    (lambda s, b, h, q, kv: s + random.random(), "the module random"),
    (lambda s, b, h, q, kv: s + random.randint(1, 9), "the module random"),
    (lambda s, b, h, q, kv: s + gauss(0, 1), "the module random"),
    (lambda s, b, h, q, kv: s + _helper(), "the module random"),
    (lambda s, b, h, q, kv: s if random.random() < 0.5 else -s, "the module random"),
    (lambda s, b, h, q, kv: s + sum(random.random() for _ in range(2)), "the module random"),
    (_imports, "the module random"),
    (lambda s, b, h, q, kv: s + mine.random(), "'mine', a random.Random"),
    (lambda s, b, h, q, kv: s + np.random.rand(), "the module numpy.random"),
    (lambda s, b, h, q, kv: s + np.random.randn(2)[0], "the module numpy.random"),
    (lambda s, b, h, q, kv: s + draw(), "the module numpy.random"),
    (_imports_numpy, "the module numpy.random"),
    (_within(np.random.rand), "the module numpy.random"),
    (lambda s, b, h, q, kv: s + rng.random(), "'rng', a numpy.random.Generator"),
    (lambda s, b, h, q, kv: s + rng.integers(9), "'rng', a numpy.random.Generator"),
    (_within(rng.normal), "'draws', a numpy.random.Generator"),
    (lambda s, b, h, q, kv: s + tools.draws.old.rand(), "'old', a numpy.random.RandomState"),
    (_Layer().score_mod, "'rng', a numpy.random.Generator"),
    (_Layer(), "'rng', a numpy.random.Generator"),
    (functools.partial(_bound, random.Random(3)), "a random.Random"),
]


@pytest.mark.parametrize(("mod", "source"), DRAWS)
def test_random_numbers_were_frozen(mod: Any, source: str) -> None:
    for _ in range(2):
        with pytest.raises(TraceError) as caught:
            trace_score(mod, DType.F32, _CPU)
        assert f"draws from {source}{_WHY}" in str(caught.value)


def test_random_numbers_in_a_mask() -> None:
    with pytest.raises(TraceError, match="draws from the module random; kernels recompute"):
        trace_mask(lambda b, h, q, kv: q - kv < random.randint(1, 9), _CPU)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, kv: s + random.random() if torch.is_complex(torch.ones(1)) else s,
        lambda s, b, h, q, kv: s + len(random.__name__) + np.pi,
        lambda s, b, h, q, kv: s + rng.bit_generator.state["has_uint32"],
    ],
)
def test_a_generator_that_is_left_alone_is_no_mistake(mod: Any) -> None:
    trace_score(mod, DType.F32, _CPU)


def test_a_method_of_a_captured_object_was_taken_for_a_constant() -> None:
    weights = {"near": 2.0}
    find = weights.get
    mod = _within(lambda: find("near"))
    (first,) = trace_score(mod, DType.F32, _CPU).numbers
    weights["near"] = 3.0
    (second,) = trace_score(mod, DType.F32, _CPU).numbers
    assert (first, second) == (2.0, 3.0)
