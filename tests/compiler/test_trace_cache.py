"""The cache of traces: what it is keyed by, how much it holds, and that threads share it."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

from attnloom.ir.node import BoundProgram, DType
from attnloom.trace import captures
from attnloom.trace.tracer import trace_mask, trace_score
from tests.harness.threads import at_once

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    captures.clear()


def _score(mod: Any) -> BoundProgram:
    return trace_score(mod, DType.F32, CPU)


def _alibi(slopes: torch.Tensor, cap: float = 2.0, window: int = 3) -> Any:
    def mod(s, b, h, q, kv):
        kept = (q - kv).abs() <= window
        return torch.where(kept, cap * torch.tanh((s + slopes[h] * (kv - q)) / cap), -1e9)

    return mod


def test_the_default_dtype_is_part_of_the_key():
    mod = lambda s, b, h, q, kv: s + (q + 1) / (kv + 2)
    single = _score(mod).program
    torch.set_default_dtype(torch.float64)
    try:
        double = _score(mod).program
    finally:
        torch.set_default_dtype(torch.float32)
    assert single != double


def test_captured_tensors_are_not_kept_alive():
    slopes = torch.ones(2)
    _score(_alibi(slopes))
    _score(_alibi(slopes, 5.0))
    alive = weakref.ref(slopes)
    del slopes
    gc.collect()
    assert alive() is None


def test_the_cache_is_bounded():
    for place in range(captures.MAX_TEMPLATES + 5):
        _score(_range_mod(place))
    assert all(len(t) <= captures.MAX_TEMPLATES for t in captures._templates.values())
    source = "lambda s, b, h, q, kv: s + {}"
    for place in range(captures.MAX_KEYS + 5):
        _score(eval(source.format(place)))
    assert len(captures._templates) <= captures.MAX_KEYS


def _range_mod(n: int) -> Any:
    return lambda s, b, h, q, kv: s + sum(range(n))


def test_threads_share_the_cache():
    failures: list[Any] = []

    def work(seed: int) -> None:
        for step in range(30):
            cap = float(seed * 100 + step + 1)
            bound = _score(_alibi(torch.full((2,), cap), cap))
            if bound.numbers[1:3] != (cap, cap) or bound.tensors[0][0] != cap:
                failures.append((cap, bound.numbers))

    at_once(work, range(4))
    assert not failures


def test_kinds_and_score_types_do_not_mix():
    mod = lambda *args: args[-2] >= args[-1]
    assert trace_mask(mod, CPU).program.outputs
    with pytest.raises(TypeError, match="returns a bool"):
        _score(mod)
    scale = lambda s, b, h, q, kv: s * 2
    types = [
        trace_score(scale, dtype, CPU).program.nodes[-1].dtype for dtype in (DType.F32, DType.F64)
    ]
    assert types == [DType.F32, DType.F64]


def test_recognising_takes_microseconds():
    """10 us is the aim on an idle machine; the bound leaves room for a busy one."""
    mod = _alibi(torch.ones(2))
    _score(mod)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        _score(mod)
        times.append(time.perf_counter() - start)
    assert min(times) < 30e-6
