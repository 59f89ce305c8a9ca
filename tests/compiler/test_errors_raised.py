"""Errors that Python or torch raise inside a mod because a traced value has no data: rewritten to
name the mod, its file and its line. The user's own errors pass."""

from __future__ import annotations

import inspect
import linecache
import math
import sys

import pytest
import torch

import attnloom
from attnloom.errors import TraceError
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_mask, trace_score

CPU = torch.device("cpu")
zero = 0
ADVICE = (
    "inside a mod score, b, h, q_idx and kv_idx are tensors without dimensions whose values exist "
    "only in the kernel. Use arithmetic, comparisons and torch functions of one score."
)

RAISED = [
    (lambda s, b, h, q, kv: s + "a",
     "TypeError: unsupported operand type(s) for +: a traced value and 'str'"),
    (lambda s, b, h, q, kv: s.nope, "AttributeError: a traced value has no attribute 'nope'"),
    (lambda s, b, h, q, kv: s(), "TypeError: a traced value is not callable"),
    (lambda s, b, h, q, kv: next(iter(s)), "TypeError: iteration over a 0-d tensor"),
    (lambda s, b, h, q, kv: torch.where(s > 0, s), "TypeError: where() received an invalid "
     "combination of arguments - got (traced value, traced value)"),
    (lambda s, b, h, q, kv: torch.vmap(torch.sin)(s), "ValueError: vmap(sin, in_dims=0, ...)"),
    (lambda s, b, h, q, kv: torch.jit.script(torch.sin)(s), "TypeError: <class 'builtin_function"),
]  # fmt: skip


@pytest.mark.parametrize(("mod", "said"), RAISED)
def test_the_place_is_in_the_mod(mod, said):
    with pytest.raises(TraceError) as caught:
        trace_score(mod, DType.F32, CPU)
    first, source = str(caught.value).split("\n    ")
    low = mod.__code__.co_firstlineno
    lines = range(low, low + len(inspect.getsource(mod).split("\n")))
    places = [f"score_mod '<lambda>' (test_errors_raised.py:{n}) raises {said}" for n in lines]
    assert any(first.startswith(place) for place in places), first
    assert first.endswith(f"; {ADVICE}")
    assert source
    assert not isinstance(caught.value.__cause__, TraceError)


def _unpack(pair):
    first, _ = pair
    return first


def test_in_a_helper_the_line_of_the_helper():
    def mask(b, h, q_idx, kv_idx):
        return _unpack(q_idx) >= kv_idx

    line = _unpack.__code__.co_firstlineno + 1
    with pytest.raises(TraceError) as caught:
        trace_mask(mask, CPU)
    assert str(caught.value) == (
        "mask_mod 'test_in_a_helper_the_line_of_the_helper.mask' "
        f"(test_errors_raised.py:{line}) raises TypeError: iteration over a 0-d tensor; {ADVICE}\n"
        "    first, _ = pair"
    )


def test_in_a_combined_mask_the_line_of_the_part():
    def wrong(b, h, q_idx, kv_idx):
        return q_idx.nope

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"\(test_errors_raised\.py:{line}\) raises Attribute"):
        trace_mask(attnloom.and_masks(attnloom.noop_mask, wrong), CPU)


def test_the_users_own_errors_pass():
    def refuses(score, b, h, q_idx, kv_idx):
        raise ValueError("my own")

    def misspelt(score, b, h, q_idx, kv_idx):
        return scor  # noqa: F821

    with pytest.raises(ValueError, match=r"^my own$"):
        trace_score(refuses, DType.F32, CPU)
    with pytest.raises(NameError):
        trace_score(misspelt, DType.F32, CPU)


@pytest.mark.parametrize(
    ("mod", "said"),
    [
        (lambda s, b, h, q, kv: s + 1 / zero, "ZeroDivisionError: "),
        (lambda s, b, h, q, kv: s + 7 % zero, "ZeroDivisionError: "),
        (lambda s, b, h, q, kv: s * 10.0 ** (400 + zero), "OverflowError: "),
        (lambda s, b, h, q, kv: s * math.exp(1000 + zero), "OverflowError: math range error"),
    ],
)
def test_arithmetic_of_the_mod_itself_names_it(mod, said):
    """On Python numbers, whether the mod's own literals or what it captures."""
    with pytest.raises(TraceError) as caught:
        trace_score(mod, DType.F32, CPU)
    text = str(caught.value)
    line = mod.__code__.co_firstlineno
    assert text.startswith(f"score_mod '<lambda>' (test_errors_raised.py:{line}) raises {said}"), (
        text
    )
    assert "this is arithmetic on Python numbers, done once while the mod is traced" in text
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_arithmetic_through_the_public_functions():
    def scaled(score, b, h, q_idx, kv_idx):
        return score * (1 / zero)

    q = torch.zeros(1, 1, 4, 8)
    line = scaled.__code__.co_firstlineno + 1
    named = rf"scaled' \(test_errors_raised\.py:{line}\) raises ZeroDivisionError"
    with pytest.raises(TraceError, match=named):
        attnloom.flex_attention(q, q, q, scaled)
    with pytest.raises(TraceError, match="raises ZeroDivisionError"):
        attnloom.create_block_mask(lambda b, h, i, j: i > j // (1 // zero), 1, 1, 8, 8)


def test_long_lines_are_cut_around_what_is_wrong():
    long = " + ".join(f"table[{n}]" for n in range(60))
    text = f"lambda s, b, h, q, kv: {long} + torch.sort(s)[0] + {long}\n"
    file = "long_line.py"
    linecache.cache[file] = (len(text), None, [text], file)
    mod = eval(compile(text, file, "eval"), {"table": torch.ones(60), "torch": torch})
    with pytest.raises(TraceError) as caught:
        trace_score(mod, DType.F32, CPU)
    shown = str(caught.value).split("\n    ")[1]
    assert shown.endswith("...")
    assert len(shown) <= 126
    if sys.version_info >= (3, 11):  # which say the column of an instruction
        assert shown.startswith("...")
        assert "torch.sort(s)" in shown


def test_through_the_public_functions():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(TraceError, match=r"\(test_errors_raised\.py:\d+\) raises AttributeError"):
        attnloom.flex_attention(q, q, q, lambda s, b, h, i, j: s.nope)
    with pytest.raises(TraceError, match=r"\(test_errors_raised\.py:\d+\) raises TypeError"):
        attnloom.create_block_mask(lambda b, h, i, j: i + None, 1, 1, 8, 8, device="cpu")
