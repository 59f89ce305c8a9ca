"""Modules of fragments are made in memory, of what this process wrote and of nothing else."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.gluon import emit as gluon_emit
from attnloom.backends.gluon.emit_mask import emit_mask as gluon_mask
from attnloom.backends.triton import emit, emit_grad, emit_ranges, fragments
from attnloom.backends.triton.emit import Target
from attnloom.errors import TraceError
from attnloom.ir.builder import Builder
from attnloom.ir.node import Axes, DType, Program
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.test_cache_safety_compiler import Loud, LoudFloat

CPU = torch.device("cpu")
SOURCE = "import triton\n\n\n@triton.jit\ndef double(x):\n    return x + x  # %s\n"


def _plain_gradient(program: Program) -> str:
    return emit_grad.emit_plain(emit_grad.gradient_of(program, False), Target(), False, False)


SCORE_WRITERS: dict[str, Callable[[Program], str]] = {
    "triton": lambda p: emit.module_text(emit.emit_score(p, Target())),
    "wide": lambda p: emit.module_text(emit.emit_score(p, Target(wide=True, exact=True))),
    "gradient": _plain_gradient,
    "gluon": lambda p: gluon_emit.emit_score(p, Target(True)),
}
MASK_WRITERS: dict[str, Callable[[Program], str]] = {
    "triton": lambda p: emit.module_text(emit.emit_mask(p, Target())),
    "ranges": lambda p: emit_ranges.emit_ranges(p, Target()),
    "gluon": lambda p: gluon_mask(p, Target(True)),
    "gluon, edges": lambda p: gluon_mask(p, Target(True, near=True), Axes.KV),
}


def test_a_module_of_the_cache_folder_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules were files there, beside compiled ones that Python believes by date and size."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
    module = fragments.load_module(SOURCE % "first")
    planted = tmp_path / "fragments" / f"{module.__name__}.py"
    planted.parent.mkdir()
    planted.write_text("raise AssertionError('it was run')")
    monkeypatch.delitem(sys.modules, module.__name__)
    assert (
        fragments.load_module(SOURCE % "first").double.raw_src[-1] == "    return x + x  # first\n"
    )
    assert sorted(tmp_path.rglob("*")) == [planted.parent, planted]


@pytest.mark.parametrize("folder", ["working", "package"])
def test_a_file_of_the_modules_name_is_not_read(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the functions nor for the source that Triton compiles."""
    text = SOURCE % folder
    probe = fragments.load_module(text)
    assert probe.__file__ is not None
    name = Path(probe.__file__).name
    monkeypatch.delitem(sys.modules, probe.__name__)
    if folder == "package":
        monkeypatch.setattr(fragments, "__file__", str(tmp_path / "fragments.py"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("import triton\n@triton.jit\ndef double(x):\n    return 7\n")
    module = fragments.load_module(text)
    assert "return x + x" in module.double.src
    linecache.checkcache()
    assert inspect.getsource(module.double.fn) == text.partition("\n\n\n")[2]


def test_the_source_is_found_after_linecache_was_cleared() -> None:
    """Triton's interpreter reads the source of a function when it first runs."""
    module = fragments.load_module(SOURCE % "cleared")
    linecache.clearcache()
    assert inspect.getsource(module.double.fn).endswith("return x + x  # cleared\n")


def test_no_folder_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with no home, a read-only home or a full disk."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("in the way")
    program = trace_score(lambda s, b, h, q, k: s * 2 + 11, DType.F32, CPU).program
    assert "score" in fragments.score_fragment(program, Target()).body.arg_names


def test_one_text_is_one_module() -> None:
    assert fragments.load_module(SOURCE % 1) is fragments.load_module(SOURCE % 1)
    assert fragments.load_module(SOURCE % 1) is not fragments.load_module(SOURCE % 2)


def test_a_second_thread_saw_a_module_before_its_functions_were_there() -> None:
    inside, release = threading.Event(), threading.Event()
    sys.modules["_gate"] = gate = type(sys)("_gate")
    gate.wait = lambda: (inside.set(), release.wait(30))
    text = "import _gate\n_gate.wait()\ndone = True\n"
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(hasattr(fragments.load_module(text), "done")))
        for _ in range(2)
    ]
    try:
        threads[0].start()
        assert inside.wait(30)
        threads[1].start()
        threads[1].join(0.2)
        assert found == []
    finally:
        release.set()
        for thread in threads:
            thread.join()
        del sys.modules["_gate"]
    assert found == [True, True]


def test_a_module_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "_stops", True, raising=False)
    text = (
        "from attnloom.backends.triton import fragments\n"
        "if fragments._stops:\n    raise KeyboardInterrupt\ndone = True\n"
    )
    with pytest.raises(KeyboardInterrupt):
        fragments.load_module(text)
    monkeypatch.setattr(fragments, "_stops", False, raising=False)
    assert fragments.load_module(text).done


# Text that reaches for the generated code; the same for C++ is in test_cache_safety_compiler.py


@pytest.mark.parametrize("number", [Loud(3), LoudFloat(1.5)])
@pytest.mark.parametrize("writer", SCORE_WRITERS)
def test_numbers_reach_code_by_value(writer: str, number: int | float) -> None:
    table = torch.randn(8)

    def mod(score, b, h, q_idx, kv_idx):
        powered = (score.abs() + 1) ** number + score * number + (q_idx % number)
        return powered + (q_idx << int(number)) + torch.clamp(score, -number, number) + table[h]

    text = SCORE_WRITERS[writer](trace_score(mod, DType.F32, CPU).program)
    assert "pwned" not in text and text.isascii()
    fragments.load_module(text)


def _loud(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with names that end what they stand in."""
    function.__name__ = function.__qualname__ = 'x"); pwned("'
    code = {"co_name": '"""\npwned()', "co_filename": "'\nimport pwned"}
    function.__code__ = function.__code__.replace(**code)
    return function


@pytest.mark.parametrize("writer", SCORE_WRITERS)
def test_names_and_strings_of_a_score_never_reach_code(writer: str) -> None:
    @_loud
    def mod(score, b, h, q_idx, kv_idx):
        """\"\"\"; pwned()"""
        pwned = "\n    pwned()"
        return score * len(pwned)

    assert "pwned" not in SCORE_WRITERS[writer](trace_score(mod, DType.F32, CPU).program)


@pytest.mark.parametrize("writer", MASK_WRITERS)
def test_names_and_strings_of_a_mask_never_reach_code(writer: str) -> None:
    @_loud
    def mod(b, h, q_idx, kv_idx):
        """\"\"\"; pwned()"""
        pwned = "\n    pwned()"
        return q_idx - kv_idx < len(pwned) + Loud(3)

    assert "pwned" not in MASK_WRITERS[writer](trace_mask(mod, CPU).program)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**40])
def test_integers_beyond_64_bits_never_reach_code(value: int) -> None:
    with pytest.raises(TraceError, match="integers in a mod must fit in 64"):
        trace_mask(lambda b, h, q, k: q + value > k, CPU)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 1e400, -math.inf, math.nan, 5e-324, -0.0])
@pytest.mark.parametrize("writer", SCORE_WRITERS)
def test_extreme_constants_are_literals(writer: str, value: float) -> None:
    """Python writes some floats as names: `inf`, `nan`."""
    builder = Builder()
    score = builder.input("score")
    constant = builder.const(value, DType.I64 if isinstance(value, int) else DType.F32)
    factor = builder.node(
        "mul", builder.cast(builder.input("q"), builder.dtype(constant)), constant
    )
    program = builder.finish(builder.node("mul", score, builder.cast(factor, DType.F32)))
    text = SCORE_WRITERS[writer](program)
    fragments.load_module(text)
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert not names & {"inf", "nan"}
    shown = f"float('{float(value)!r}')" if not math.isfinite(value) else repr(value)
    assert shown in text
