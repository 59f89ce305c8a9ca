"""Finding a compiler, what its output depends on, and what a user is told when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnloom.backends.cpu import build, toolchain
from attnloom.backends.cpu.toolchain import Toolchain
from attnloom.errors import CompileError


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What was found before, with another environment, is looked for again."""
    toolchain.available.cache_clear()
    yield
    toolchain.available.cache_clear()


def program(folder: Path, name: str, script: str = "exit 0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def look(monkeypatch: pytest.MonkeyPatch, path: Path, cxx: str | None = None) -> Toolchain | None:
    monkeypatch.setenv("PATH", str(path))
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", cxx)
    return toolchain.available()


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert look(monkeypatch, tmp_path) is None
    for name in ("c++", "clang++", "g++"):
        expected = program(tmp_path, name)
        toolchain.available.cache_clear()
        found = look(monkeypatch, tmp_path)
        assert found is not None and found.command == (str(expected),)
    mine = program(tmp_path, "mine")
    toolchain.available.cache_clear()
    found = look(monkeypatch, tmp_path, "mine -Wall")
    assert found is not None and found.command == (str(mine), "-Wall")


def test_zig_when_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        origin = str(tmp_path / "ziglang" / "__init__.py")

    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: Spec)
    found = look(monkeypatch, tmp_path)
    assert found is not None
    assert found.command == (sys.executable, "-m", "ziglang", "cc")
    assert "-fno-sanitize=undefined" in found.flags()


def test_cxx_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError) as error:
        look(monkeypatch, tmp_path, "no-such-compiler -m64")
    assert str(error.value) == (
        "CXX is 'no-such-compiler -m64', but there is no such program. Set CXX to a C++ compiler, "
        "or unset it to let attnloom look for g++ and clang++."
    )


def test_windows_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert toolchain.available() is None


def test_identity_follows_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "g++")
    before = look(monkeypatch, tmp_path)
    program(tmp_path, "g++", "exit 1 # another version")
    toolchain.available.cache_clear()
    after = look(monkeypatch, tmp_path)
    assert before is not None and after is not None
    assert before.identity != after.identity


def test_finding_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "g++", f"touch {tmp_path}/ran")
    found = look(monkeypatch, tmp_path)
    assert found is not None and found.flags()
    assert not (tmp_path / "ran").exists()


def test_refusal_quotes_the_compiler(tmp_path: Path) -> None:
    refusing = program(tmp_path, "g++", "echo 'error: no such instruction' >&2; exit 3")
    tools = Toolchain((str(refusing),), "g++", "", "")
    with pytest.raises(CompileError) as error:
        tools.compile("int x;", tmp_path / "kernel.so", (), tmp_path)
    text = str(error.value)
    assert text.startswith("the C++ compiler g++ failed with exit code 3. ")
    assert text.endswith("It said:\nerror: no such instruction")


def test_compiler_that_cannot_run(tmp_path: Path) -> None:
    tools = Toolchain((str(tmp_path / "gone"),), "gone", "", "")
    with pytest.raises(CompileError, match=r"could not run the C\+\+ compiler gone: .* Set CXX"):
        tools.version()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "available", lambda: None)
    with pytest.raises(CompileError, match=r"none was found\. Install g\+\+ or clang"):
        build.load_source("int no_compiler_for_this;")


def test_matrix_tiles_are_a_flag_of_kernels_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = Toolchain(("g++",), "g++", "", "")
    for allowed in (True, False):
        monkeypatch.setattr(toolchain, "matrix_tiles_allowed", lambda allowed=allowed: allowed)
        assert (toolchain.MATRIX_TILES in tools.flags()) is allowed
        assert toolchain.MATRIX_TILES not in tools.flags(("-mavx2",))


def test_matrix_tiles_are_not_asked_for_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "cpu_features", lambda: "amx_tile avx512f")
    monkeypatch.setattr(toolchain.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert toolchain.matrix_tiles_allowed.__wrapped__() is False


def test_features_of_this_cpu() -> None:
    features = toolchain.cpu_features()
    assert features == toolchain.cpu_features()
    assert len(features.split()) >= 1
