"""The text of jit functions is what Triton would find by itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import attnloom

triton = pytest.importorskip("triton")

# ruff: noqa: E402
from attnloom.backends.triton import sources
from attnloom.backends.triton.fragments import load_module

_FEWEST = 60  # functions of the portable kernels


def _jit_functions() -> Iterator[Any]:
    for folder in ("backends.triton", "backends.gluon", "serving.kernels"):
        package = importlib.import_module(f"attnloom.{folder}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                module = importlib.import_module(found.name)
            except ImportError:  # Gluon is not in every version of Triton
                continue
            for value in vars(module).values():
                function = getattr(value, "fn", None)
                if getattr(function, "__module__", "") == found.name:
                    yield function


def test_functions_end_where_tokens_end():
    functions = list(_jit_functions())
    assert len(functions) >= _FEWEST
    for function in functions:
        assert sources.lines_of(function) == inspect.getsourcelines(function), function


def test_fragments_end_where_tokens_end():
    text = (
        "import triton\n\n\n@triton.jit\ndef one(\n    x,\n):  # fmt: skip\n    # why\n\n"
        "    return x\n    # last\n\n# of the module\n\n\n@triton.jit\ndef two(x):\n    return x\n"
    )
    module = load_module(text)
    for name, length in (("one", 8), ("two", 3)):
        function = getattr(module, name).fn
        found = sources.lines_of(function)
        assert found == inspect.getsourcelines(function)
        assert found is not None
        assert len(found[0]) == length


def test_others_are_left_to_inspect():
    def inner():
        return 0

    for function in (inner, attnloom.flex_attention, subprocess.run, sources._Inspect, 1):
        ours = function is attnloom.flex_attention
        assert (sources.lines_of(function) is not None) is ours
    inner.__module__ = "attnloom.inner"
    assert sources.lines_of(inner) is None
    assert sources._Inspect().getsourcelines(inner) == inspect.getsourcelines(inner)
    assert sources._Inspect().signature is inspect.signature


def test_importing_kernels_takes_nothing_apart():
    """0.4 ms for each of some 200 functions, in every process that makes a first call."""
    program = """
import attnloom, inspect, sys, triton
taken, getblock = [], inspect.getblock
def counted(lines):
    taken.append(lines[0:2])
    return getblock(lines)
inspect.getblock = counted
import attnloom.backends.triton.launch
import attnloom.backends.triton.mask_lists
assert not taken, taken
"""
    subprocess.run([sys.executable, "-c", program], check=True)
