"""attnloom.doctor: what is missing becomes a finding that says how to get it."""

from __future__ import annotations

import os

import pytest

import attnloom
from attnloom.backends.cpu import cache, toolchain
from attnloom.tools import diagnosis
from attnloom.tools.diagnosis import inspect_cache
from tests.harness.unprivileged import read_only_folder


@pytest.fixture
def fresh_toolchain():
    """The compiler is looked for again, before and after."""
    toolchain.available.cache_clear()
    yield
    toolchain.available.cache_clear()


def test_the_self_test_runs_and_agrees():
    found = attnloom.doctor()
    assert found.self_test is not None
    assert found.self_test.problem == ""
    assert found.self_test.largest_error < 1e-5
    assert found.self_test.next_seconds > 0
    assert found.versions["torch"]
    assert found.num_cores >= 1


def test_nothing_is_run_when_not_asked():
    told = []
    assert attnloom.doctor(run=False, progress=told.append).self_test is None
    assert told[0] == "looking at the compiler"


def test_a_cxx_that_does_not_exist(monkeypatch, fresh_toolchain):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    found = attnloom.doctor(run=False)
    assert not found.healthy
    # Whatever else the machine lacks (room for kernels, say) is found too.
    (finding,) = diagnosis._compiler_findings(found.compiler)
    assert finding in found.findings
    assert finding.serious
    assert finding.what.startswith("CXX is '/no/such/compiler', but there is no such program.")


def test_no_compiler_at_all(monkeypatch, fresh_toolchain):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    compiler = diagnosis._compiler()
    assert compiler.problem == "no C++ compiler was found."
    (finding,) = diagnosis._compiler_findings(compiler)
    assert "apt install g++" in finding.fix
    assert "pip install ziglang" in finding.fix


def test_a_compiler_that_fails(monkeypatch, tmp_path, fresh_toolchain):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho licence expired >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    compiler = diagnosis._compiler()
    assert compiler.path == str(broken)
    assert "failed with exit code 3" in compiler.problem
    assert "licence expired" in compiler.problem


def test_cache_that_holds_kernels(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / cache.KERNEL).write_bytes(b"x" * 100)
    state = inspect_cache(folder)
    assert (state.exists, state.num_kernels, state.total_bytes, state.problem) == (True, 2, 200, "")


def test_files_that_vanish_while_the_cache_is_counted(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    (folder / "staging").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    for name in ("kept", "gone"):
        (folder / "staging" / name).write_bytes(b"x" * 100)
    walk = os.walk

    def walk_and_remove(path):
        for found in walk(path):
            if "gone" in found[2]:
                (folder / "staging" / "gone").unlink()
            yield found

    monkeypatch.setattr(os, "walk", walk_and_remove)
    state = inspect_cache(folder)
    assert (state.problem, state.total_bytes) == ("", 100)


def test_cache_that_others_can_write_to(tmp_path):
    tmp_path.chmod(0o777)
    state = inspect_cache(tmp_path)
    assert "can be written by other users" in state.problem
    (finding,) = diagnosis._cache_findings(state)
    assert finding.serious
    assert "ATTNLOOM_CACHE_DIR" in finding.fix


@pytest.mark.parametrize("exists", [True, False])
def test_the_doctor_took_a_cache_that_others_can_replace_for_usable(tmp_path, exists):
    shared = tmp_path / "shared"
    (shared / "kernels").mkdir(parents=True, mode=0o700)
    shared.chmod(0o777)
    state = inspect_cache(shared / ("kernels" if exists else "others"))
    assert state.exists is exists
    assert "where any user can replace it" in state.problem


def test_cache_that_is_not_made_yet(tmp_path):
    state = inspect_cache(tmp_path / "a" / "b")
    assert (state.exists, state.problem) == (False, "")


def test_cache_that_cannot_be_made():
    with read_only_folder() as folder:
        state = inspect_cache(folder / "a")
    assert state.problem.endswith(f"'{folder}' cannot be written by you.")


def test_cache_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written by you" in inspect_cache(tmp_path / "file" / "a").problem


def test_threads():
    assert diagnosis._thread_findings(2, 2) == []
    (more,) = diagnosis._thread_findings(8, 2)
    assert more.what == "torch uses 8 threads, but this process may run on 2 cores."
    assert not more.serious
    (fewer,) = diagnosis._thread_findings(1, 2)
    assert fewer.what == "torch uses 1 of 2 cores."


def test_matrix_tiles_that_the_system_withholds(monkeypatch):
    monkeypatch.setattr(toolchain, "cpu_features", lambda: "amx_bf16 amx_tile avx512f")
    monkeypatch.setattr(toolchain, "matrix_tiles_allowed", lambda: False)
    (finding,) = diagnosis._tile_findings()
    assert finding.what.startswith("the processor has matrix tiles (amx_bf16), but this process")
    assert not finding.serious
    monkeypatch.setattr(toolchain, "matrix_tiles_allowed", lambda: True)
    assert diagnosis._tile_findings() == []
    monkeypatch.setattr(toolchain, "cpu_features", lambda: "avx512f")
    monkeypatch.setattr(toolchain, "matrix_tiles_allowed", lambda: False)
    assert diagnosis._tile_findings() == []


def test_a_gpu_without_triton():
    gpu = diagnosis.Gpu("A GPU", "9.0", 1 << 30, 132, 228 << 10, 65536)
    (finding,) = diagnosis._gpu_findings((gpu,), {"triton": "", "torch": "2.13"})
    assert finding.what == "there is a GPU, but the package triton is not installed."
    assert diagnosis._gpu_findings((gpu,), {"triton": "3.6", "torch": "2.13"}) == []


def test_a_wrong_result_is_serious(monkeypatch):
    real = diagnosis.flex_attention
    monkeypatch.setattr(diagnosis, "flex_attention", lambda *a, **k: real(*a, **k) * 1.01)
    found = attnloom.doctor()
    assert not found.healthy
    assert any("a small attention failed: results are" in f.what for f in found.findings)
