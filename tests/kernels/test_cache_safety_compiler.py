"""Compilers that fail, hang or lie, and mods that try to get text into generated code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnloom.backends.cpu import build, cache, toolchain
from attnloom.backends.cpu.build import KernelSpec, compose
from attnloom.errors import CompileError, TraceError
from attnloom.ir.node import DType
from attnloom.trace.tracer import trace_score
from tests.harness.agree import agrees, qkv

SOURCE = 'extern "C" int never_built_%s() { return 1; }'
Look = Callable[[str], str]


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """Given the script of a compiler (or CXX itself, after `CXX=`), the error that it leads to."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "cache"))

    def run(script: str) -> str:
        path = tmp_path / "cxx"
        if script.startswith("CXX="):
            monkeypatch.setenv("CXX", script[4:])
        else:
            path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\n{script}\n')
            path.chmod(0o755)
            monkeypatch.setenv("CXX", str(path))
        cache.shared_cache.cache_clear()
        toolchain.available.cache_clear()
        with pytest.raises(CompileError) as error:
            build.load_source(SOURCE % abs(hash(script)))
        left = [p.name for p in (tmp_path / "cache").glob("*") if p.is_dir()]
        assert left == [], "a kernel that failed is in the cache"
        return str(error.value)

    yield run
    cache.shared_cache.cache_clear()
    toolchain.available.cache_clear()


def test_refusal_names_the_command_and_quotes_the_compiler(failure: Look) -> None:
    text = failure("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do echo error $i >&2; done; exit 2")
    assert "failed with exit code 2. " in text
    assert "Set CXX to another compiler, or use kernel_options=" in text
    assert "The command was:\n" in text and "-shared -fPIC" in text
    assert text.endswith("error 11\nerror 12")


def test_crash_names_the_signal(failure: Look) -> None:
    assert "was killed by SIGSEGV. " in failure("kill -SEGV $$")


def test_output_in_no_encoding(failure: Look) -> None:
    text = failure("printf 'bad \\377\\376 byte' >&2; exit 1")
    assert text.endswith("bad \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} byte")


def test_hanging_compiler_is_stopped_with_its_children(
    failure: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that outlives the compiler holds its output open, on which one would wait."""
    monkeypatch.setattr(toolchain, "_TIMEOUT_S", 0.5)
    start = time.monotonic()
    assert "was stopped after 0.5 s. " in failure("sleep 50 & sleep 50; exit 0")
    assert time.monotonic() - start < 25


def test_compiler_that_makes_nothing(failure: Look) -> None:
    text = failure("exit 0")
    assert "wrote no kernel. " in text and text.endswith("It said:\n(nothing)")


def test_compiler_that_makes_garbage(failure: Look) -> None:
    text = failure('for out; do :; done; echo "no machine code" > "$out"')
    assert "made a kernel that cannot be loaded: " in text
    assert "Unset CXX or set it to g++ or clang++" in text


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("g++ 'unclosed", "which is no command: No closing quotation. Set CXX"),
        ("/", "but there is no such program"),
        ("''", "but there is no such program"),
        ("/etc/passwd -O2", "but there is no such program"),
        ("/no/such/g++", "but there is no such program"),
        ("true", "wrote no kernel"),
        ("cat", "failed with exit code 1"),
    ],
)
def test_odd_compilers(cxx: str, said: str, failure: Look) -> None:
    assert said in failure(f"CXX={cxx}")


def test_no_room_for_a_kernel(failure: Look) -> None:
    """As on a full disk: a compiler may write no more than a block."""
    text = failure("ulimit -f 1; for out; do :; done; head -c 100000 /dev/zero > $out || exit 1")
    assert "failed with exit code 1" in text or "was killed by SIGXFSZ" in text


# Text that reaches for the generated code


class Loud(int):
    """A number whose text is code."""

    def __repr__(self) -> str:
        return "0); pwned("

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)


class LoudFloat(float):
    __repr__ = __str__ = Loud.__repr__

    def __format__(self, _: str) -> str:
        return repr(self)


def composed(mod: Callable[..., Any], kernel: str = "forward") -> str:
    bound = trace_score(mod, DType.F32, torch.device("cpu"))
    return compose(KernelSpec(kernel, bound.program, None))


@pytest.mark.parametrize("number", [Loud(3), LoudFloat(1.5)])
def test_numbers_reach_code_by_value(number: int | float) -> None:
    table = torch.randn(8)

    def mod(score, b, h, q_idx, kv_idx):
        powered = (score.abs() + 1) ** number + score * number + (q_idx % number)
        return powered + (q_idx << int(number)) + torch.clamp(score, -number, number) + table[h]

    for kernel in ("forward", "backward"):
        text = composed(mod, kernel)
        assert "pwned" not in text and text.isascii()
    plain = type(number).__mro__[1](number.real)
    tensors = qkv(1, 1, 9, 8)
    agrees(*tensors, lambda s, b, h, q, k: torch.sin(s) * number + torch.sigmoid(s) ** plain)


def test_names_and_strings_never_reach_code() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        """*/ pwned(); /*"""
        pwned = "); pwned(); //"
        return score + len(pwned)

    mod.__name__ = mod.__qualname__ = 'x"); pwned(); ("'
    mod.__code__ = mod.__code__.replace(co_name="*/ pwned(); /*", co_filename='"\n#include "pwned"')
    for kernel in ("forward", "backward"):
        assert "pwned" not in composed(mod, kernel)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**40])
def test_integers_beyond_64_bits_are_refused(value: int) -> None:
    with pytest.raises(TraceError, match=r"computes with -?\d+; integers in a mod must fit in 64"):
        composed(lambda score, b, h, q_idx, kv_idx: score + (q_idx + value))


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**31, -(2**31), 2**32 + 1])
def test_widest_integers(value: int) -> None:
    wide = torch.tensor([value, value])
    agrees(
        *qkv(1, 2, 5, 4),
        lambda s, b, h, q, k: torch.where(wide[h] - value + (q ^ value) == (k ^ value), s, 2 * s),
    )


@pytest.mark.parametrize(
    "value", [1e400, -math.inf, math.nan, 5e-324, 1e-45, -0.0, 3.5e38, 1.7976931348623157e308]
)
def test_extreme_floats(value: float) -> None:
    """As numbers and as literals of generated code; NaN and infinities decide, and enter no sum."""

    def mod(score, b, h, q_idx, kv_idx):
        apart = torch.where(score * value > 1.0, 0.25, score)
        return torch.where(torch.isnan(score + value), apart - 1.0, apart)

    agrees(*qkv(1, 1, 6, 4), mod)
    captured = torch.tensor(value, dtype=torch.float64).float()
    agrees(*qkv(1, 1, 6, 4), lambda s, b, h, q, k: torch.where(s * captured > 1.0, 0.25, s))
