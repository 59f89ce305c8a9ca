"""What becomes a constant, what a run-time number, and how control flow merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.text import text
from attnloom.trace import captures
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")


def _score(mod: Any) -> BoundProgram:
    return trace_score(mod, DType.F32, CPU)


def _ops(bound: BoundProgram) -> list[str]:
    return [n.op for n in bound.program.nodes if n.op != "input"]


def test_literals_of_operators_are_constants():
    bound = trace_mask(lambda b, h, q, kv: (q // 64 >= kv // 64) & (2 * q > kv - 1), CPU)
    assert bound.numbers == ()
    constants = {n.attr for n in bound.program.nodes if n.op == "const"}
    assert constants == {64, 2, 1}


def test_a_captured_number_that_equals_a_literal_is_a_number():
    def make(w: int) -> Any:
        return lambda b, h, q, kv: (q + 2 > kv) & (q + w > kv) & (w + q > 2)

    bound = trace_mask(make(2), CPU)
    assert bound.numbers == (2, 2)
    digests = {bound.program.digest}
    for w in (3, 0, 1, -1):
        captures.clear()
        digests.add(trace_mask(make(w), CPU).program.digest)
    assert len(digests) == 1


def test_a_chosen_literal_is_no_literal():
    """The operand comes out of a conditional, so that the instruction before is not all of it."""

    def make(flag: bool) -> Any:
        return lambda s, b, h, q, kv: s * (0.5 if flag else 2.0)

    assert _score(make(True)).numbers == (0.5,)
    assert _score(make(False)).numbers == (2.0,)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: lambda s, b, h, q, kv: torch.where((q - kv).abs() <= w, s, -w),
        lambda w: lambda s, b, h, q, kv: s.clamp(-w, w),
        lambda w: lambda s, b, h, q, kv: s + (q - kv) * w,
        lambda w: lambda s, b, h, q, kv: (s + w) if q > kv else w,
        lambda w: lambda s, b, h, q, kv: s + torch.ones(w + 5)[kv],
        lambda w: lambda s, b, h, q, kv: s + torch.ones(w + 5, 3)[kv].sum(),
        lambda w: lambda s, b, h, q, kv: s + torch.ones(3, w + 5)[h].mean(),
        lambda w: lambda s, b, h, q, kv: s + (w // 2) * q - w % 3,
        lambda w: lambda s, b, h, q, kv: s * float(w) - w / 2,
    ],
)
def test_structure_does_not_depend_on_values(make: Any) -> None:
    digests = set()
    for w in (1, 2, 0, 7):
        captures.clear()
        digests.add(_score(make(w)).program.digest)
    assert len(digests) == 1


def test_structural_exponents_and_shifts():
    def make(n: int) -> Any:
        return lambda s, b, h, q, kv: s**n + (kv << n)

    squared = _score(make(2))
    assert "pow" not in _ops(squared)
    assert squared.numbers == ()
    assert _score(make(5)).program.digest != squared.program.digest


def test_paths_share_the_numbers_and_loads_after_a_join():
    """Both paths run the last line; what they compute alike exists once."""
    reach = 4
    table = torch.ones(9)

    def mod(s, b, h, q, kv):
        s = s * 2 if q > kv else s
        return s + table[q - kv + reach]

    bound = _score(mod)
    assert bound.numbers == (4,)
    assert _ops(bound).count("load") == 1


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda b, h, q, kv: kv < 5 or q >= kv, ["const", "lt", "ge", "or"]),
        (lambda b, h, q, kv: kv < 5 and q >= kv, ["const", "lt", "ge", "and"]),
        (lambda b, h, q, kv: not q >= kv, ["ge", "not"]),
        (lambda b, h, q, kv: True if q >= kv else False, ["ge"]),  # noqa: SIM210
        (lambda b, h, q, kv: False if q >= kv else True, ["ge", "not"]),  # noqa: SIM211
        (lambda b, h, q, kv: q >= kv if h == 0 else True, ["const", "eq", "ge", "not", "or"]),
        (lambda b, h, q, kv: q > kv or q > kv or q > kv, ["gt"]),
    ],
)
def test_python_logic_becomes_plain_logic(mod: Any, expected: list[str]) -> None:
    assert sorted(_ops(trace_mask(mod, CPU))) == sorted(expected)


def test_a_condition_is_asked_once():
    """32 questions, two different ones: four paths at most."""

    def mod(s, b, h, q, kv):
        for _ in range(16):
            s = s + (1 if q > kv else 2) * (3 if h == 0 else 4)
        return s

    assert _score(mod).program.outputs


def test_text_of_a_traced_mod():
    slopes = torch.ones(2)
    bound = _score(lambda s, b, h, q, kv: s + slopes[h] * (kv - q))
    assert text(bound.program) == (
        "tensor t0: float32 rank 1\n"
        "%0 = input i64 h                    # h\n"
        "%1 = input i64 q                    # q\n"
        "%2 = input i64 kv                   # kv\n"
        "%3 = input f32 score                # b h q kv\n"
        "%4 = sub i64 %2 %1                  # q kv\n"
        "%5 = load f32 t0[%0]                # h\n"
        "%6 = cast f32 %4                    # q kv\n"
        "%7 = mul f32 %5 %6                  # h q kv\n"
        "%8 = add f32 %3 %7                  # b h q kv\n"
        "return %8"
    )
