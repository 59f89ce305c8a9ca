"""Tracing under other modes, default devices, grad modes, transforms and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attnloom.ir.node import BoundProgram, DType
from attnloom.stats import compile_stats, count, reset_compile_stats
from attnloom.trace import captures
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")
SLOPES = torch.tensor([0.5, 0.25])


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    captures.clear()


def _alibi(s, b, h, q, kv):
    return s + SLOPES[h] * (kv - q) + torch.tensor([1.0, 2.0])[h]


def _prefix(b, h, q, kv):
    return kv < 3 or q >= kv


def _traced() -> tuple[BoundProgram, BoundProgram]:
    return trace_score(_alibi, DType.F32, CPU), trace_mask(_prefix, CPU)


def _digests() -> tuple[str, str]:
    score, mask = _traced()
    return score.program.digest, mask.program.digest


class _Quiet(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        assert not any(type(a).__name__ == "Symbol" for a in args)
        return func(*args, **(kwargs or {}))


def test_other_modes_see_host_functions_only():
    expected = _digests()
    with _Quiet() as mode:
        captures.clear()
        assert _digests() == expected
    assert mode.seen


def test_a_default_device():
    expected = _digests()
    captures.clear()
    with torch.device("cpu"):
        assert _digests() == expected
    with (
        torch.device("meta"),
        pytest.raises(TypeError, match="on meta while the inputs are on cpu"),
    ):
        _digests()


def test_inference_mode_and_no_grad():
    expected = _digests()
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            captures.clear()
            assert _digests() == expected


def test_inside_a_transform():
    expected = _digests()
    captures.clear()
    seen = []

    def function(x):
        seen.append(_digests())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert seen == [expected, expected]


def test_inside_a_trace():
    """A mod that traces another mod, as a cache that warms itself does."""
    inner = []

    def mod(s, b, h, q, kv):
        inner.append(trace_mask(_prefix, CPU).program.digest)
        return s * 2

    trace_score(mod, DType.F32, CPU)
    assert inner == [_digests()[1]]


@pytest.mark.slow
def test_inside_a_compiled_function():
    expected = len(_traced()[0].program.nodes)
    captures.clear()

    def function(x):
        y = x * 2
        return y + len(trace_score(_alibi, DType.F32, CPU).program.nodes)

    compiled = torch.compile(function, backend="eager")
    assert compiled(torch.ones(1)).item() == 2 + expected
    assert compiled(torch.ones(1)).item() == 2 + expected


def test_printing_a_traced_value(capsys: pytest.CaptureFixture[str]):
    def mod(s, b, h, q, kv):
        print(s, f"{q:>5}", [kv])
        return s

    trace_score(mod, DType.F32, CPU)
    assert capsys.readouterr().out == "<traced float32> <traced int64> [<traced int64>]\n"


def test_stats_count_and_reset():
    reset_compile_stats()
    assert compile_stats().traces == 0
    _traced()
    _traced()
    # _alibi makes a tensor inside, so that it is traced each time; _prefix is recognised.
    assert compile_stats().traces == 3
    count("kernels_compiled", 2)
    assert compile_stats().kernels_compiled == 2
    with pytest.raises(KeyError, match="no counter is called 'launches'"):
        count("launches")
    reset_compile_stats()
    assert compile_stats().kernels_compiled == 0
