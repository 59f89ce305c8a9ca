"""What bytecode tells of a function, on every Python version that runs these tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from attnloom.trace.code_facts import code_facts, is_literal

OFFSET: Any = 7


class _Probe:
    """Notes for each operator whether its other operand is a literal."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def _operate(self, other: Any) -> _Probe:
        frame = sys._getframe(1)
        self.answers.append(is_literal(frame.f_code, frame.f_lasti, other))
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operate
    __mod__ = __floordiv__ = __lt__ = __gt__ = __ge__ = _operate


def test_literals_are_told_from_values():
    width, flag = 2, True

    def literal(x):
        x + 2, 2 * x, x // 64, x + (-1), 300 * x, x < 3, x % 7, 5 - x, (x + 1) * 0.5

    def value(x):
        x + width, width * x, x * (0.5 if flag else 2.0), x >= width, x + OFFSET, x - (width + 1)

    for function, expected in ((literal, [True] * 10), (value, [False] * 6)):
        probe = _Probe()
        function(probe)
        assert probe.answers == expected


def test_what_a_function_reads():
    import math

    holder: Any = None

    def function(x, self):
        y = x + self.config.window
        z = self.bias + OFFSET
        return lambda: (math.sqrt(y), holder.scale.value, z, abs(x))

    facts = code_facts(function.__code__)
    assert facts.global_names == ("OFFSET", "abs")
    assert set(facts.chains["self"]) == {("config", "window"), ("bias",)}
    assert facts.chains["holder"] == (("scale", "value"),)
    assert facts.chains["math"] == (("sqrt",),)
    assert facts.pure_lookup


def test_a_whole_use_is_seen():
    def passed_on(self):
        return repr(self), self.x

    def stored(self):
        self.x = 1

    def aliased(self):
        other = self
        return other.x

    for function in (passed_on, stored, aliased):
        assert () in code_facts(function.__code__).chains["self"]


def _count():
    global OFFSET
    OFFSET = 8


def _imports():
    import json

    return json


def _defines_class():
    class Inner:
        pass

    return Inner


@pytest.mark.parametrize("function", [_count, _imports, _defines_class])
def test_effects_are_seen(function: Any) -> None:
    assert not code_facts(function.__code__).pure_lookup


def test_writing_a_captured_variable_is_seen():
    total = 0

    def outer():
        def inner():
            nonlocal total
            total += 1

        inner()

    assert not code_facts(outer.__code__).pure_lookup
