"""Never a wrong kernel: damaged, foreign and half-written entries, changed machines, forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attnloom
from attnloom.backends import folder as cache_folder
from attnloom.backends.cpu import build, cache, toolchain
from attnloom.backends.cpu.forks import threads_lost
from attnloom.errors import CacheError, CompileError
from attnloom.stats import compile_stats, reset_compile_stats
from tests.harness.unprivileged import read_only_folder

ROOT = Path(__file__).parents[2]
SOURCE = 'extern "C" int answer() { return %d; }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for this process, and a compiler that is looked for anew."""
    chosen = tmp_path / "cache"
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(chosen))
    monkeypatch.setattr(cache_folder, "_warned", False)
    another_process()
    yield chosen
    another_process()


def another_process() -> None:
    """Forget what a new process would not know."""
    cache.shared_cache.cache_clear()
    toolchain.available.cache_clear()


def answer(number: int) -> tuple[int, int]:
    """What the kernel says, and how often the compiler ran."""
    reset_compile_stats()
    library = build.load_source(SOURCE % number)
    return library.answer(), compile_stats().kernels_compiled


def the_entry(folder: Path) -> Path:
    (entry,) = (p for p in folder.iterdir() if p.is_dir())
    return entry


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_umask_that_lets_a_group_write(folder: Path) -> None:
    """As is the default of several distributions; such entries were never found again."""
    before = os.umask(0o002)
    try:
        assert answer(20) == (20, 1)
    finally:
        os.umask(before)
    another_process()
    assert answer(20) == (20, 0)
    assert not (the_entry(folder) / build.cache.KERNEL).stat().st_mode & 0o077


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, lambda data: b""])
def test_damaged_kernel_is_not_loaded(folder: Path, damage) -> None:
    assert answer(21) == (21, 1)
    kernel = the_entry(folder) / cache.KERNEL
    damaged = folder.parent / "damaged"
    damaged.write_bytes(damage(kernel.read_bytes()))
    damaged.replace(kernel)
    assert answer(21) == (21, 1)
    assert answer(21) == (21, 0)


@pytest.mark.parametrize("missing", [cache.KERNEL, "sha256"])
def test_entry_without_a_file(folder: Path, missing: str) -> None:
    assert answer(22) == (22, 1)
    (the_entry(folder) / missing).unlink()
    assert answer(22) == (22, 1)
    assert answer(22) == (22, 0)


def test_process_killed_while_it_compiles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    script = (
        f'case "$*" in *--version*) exit 0;; esac\nfor out; do :; done\n'
        f'printf half > "$out"; echo $$ > {started}; exec sleep 60'
    )
    code = f"from attnloom.backends.cpu.build import load_source; load_source({SOURCE % 23!r})"
    slow = str(program(tmp_path / "slow", script))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"CXX": slow}
    )
    try:
        for _ in range(600):
            if started.exists() and started.read_text().endswith("\n"):
                break
            time.sleep(0.1)
        compiler = int(started.read_text())
    finally:
        process.kill()
        process.wait()
    os.kill(compiler, signal.SIGKILL)
    (left,) = (p for p in folder.iterdir() if p.is_dir())
    assert left.name.startswith("new-") and (left / cache.KERNEL).read_text() == "half"
    assert answer(23) == (23, 1)
    assert left.exists()  # its process might still be alive
    os.utime(left, (0, 0))
    assert answer(24) == (24, 1)
    assert not left.exists()


def test_entry_that_is_a_symlink_is_replaced(folder: Path, tmp_path: Path) -> None:
    assert answer(25) == (25, 1)
    entry, elsewhere = the_entry(folder), tmp_path / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    assert answer(25) == (25, 1)
    assert not entry.is_symlink() and (elsewhere / cache.KERNEL).exists()
    assert answer(25) == (25, 0)


def test_entry_that_is_a_broken_symlink_or_a_file(folder: Path, tmp_path: Path) -> None:
    assert answer(26) == (26, 1)
    entry = the_entry(folder)
    for obstacle in (lambda: entry.symlink_to(tmp_path / "gone"), lambda: entry.write_text("x")):
        entry.rename(tmp_path / f"aside{time.monotonic_ns()}")
        obstacle()
        assert answer(26) == (26, 1)
        assert answer(26) == (26, 0)


def test_kernel_that_is_a_symlink(folder: Path, tmp_path: Path) -> None:
    assert answer(27) == (27, 1)
    kernel = the_entry(folder) / cache.KERNEL
    kernel.rename(tmp_path / "kernel.so")
    kernel.symlink_to(tmp_path / "kernel.so")
    assert answer(27) == (27, 1)


def test_folder_that_others_can_replace(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    store = cache.KernelCache(shared / "cache")
    with pytest.warns(UserWarning, match="where any user can replace it"):
        assert store.find("key") is None
        with store.staging() as staging:
            assert staging.parent != store.folder
    shared.chmod(0o1777)  # as /tmp: only the owner can rename what lies in it
    with cache.KernelCache(shared / "cache").staging() as staging:
        assert staging.parent == shared / "cache"


def test_read_only_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLOOM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with read_only_folder() as home:
        monkeypatch.setenv("HOME", str(home))
        another_process()
        with pytest.warns(UserWarning, match=r"cannot be used: .*Permission denied"):
            assert answer(28) == (28, 1)


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ATTNLOOM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    another_process()
    with pytest.warns(UserWarning, match="no folder for the kernel cache: Could not .* Set HOME"):
        assert answer(29) == (29, 1)


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification says so; a kernel cache in each working directory helps nobody."""
    monkeypatch.delenv("ATTNLOOM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder.default_folder() == Path.home() / ".cache" / "attnloom"


def test_missing_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.setattr(cache.tempfile, "tempdir", None)
    assert answer(30) == (30, 1)


def test_no_folder_to_write_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", none)
    with (
        pytest.warns(UserWarning, match="cannot be written"),
        pytest.raises(CacheError, match=r"no folder to compile a kernel in: .*Set TMPDIR, or"),
    ):
        answer(31)


def test_full_disk_under_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler fails there; the kernel is built in the temporary folder instead."""
    real = toolchain.available()
    assert real is not None
    script = (
        f'case "$*" in *{folder}*) echo "No space left" >&2; exit 1;; esac\nexec {real.name} "$@"'
    )
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", script)))
    another_process()
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.is_relative_to(folder):
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left on device"):
        assert answer(32) == (32, 1)
    assert not list(folder.glob("new-*"))


def test_folder_on_a_file_system_that_cannot_execute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(33) == (33, 1)
    entry, load = the_entry(folder), build.ctypes.CDLL

    def refuse(path: str) -> object:
        if path.startswith(str(entry)):
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    with pytest.warns(UserWarning, match="cannot be loaded: failed to map segment"):
        assert answer(33) == (33, 1)


def test_other_cpu_and_other_compiler_have_kernels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(34) == (34, 1)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "cpu_features", lambda: "fewer instructions")
        another_process()
        assert answer(34) == (34, 1)
    another_process()
    assert answer(34) == (34, 0)
    real = toolchain.available()
    assert real is not None
    wrapper = program(tmp_path / "cxx", f'exec {real.name} "$@"')
    launcher = program(tmp_path / "launcher", 'exec "$@"')
    for command in (wrapper, f"{launcher} {wrapper}"):
        monkeypatch.setenv("CXX", str(command))
        another_process()
        assert answer(34) == (34, 1)
    program(wrapper, f'exec {real.name} "$@" # a newer version')
    another_process()
    assert answer(34) == (34, 1)  # also behind a launcher
    another_process()
    assert answer(34) == (34, 0)


def test_headers_replaced_while_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key names the headers that were read, so those are what is compiled."""
    build._headers()
    (tmp_path / "args.h").write_text("#error an upgrade replaced this file")
    monkeypatch.setattr(build, "KERNELS", tmp_path)
    source = '#include "simd.h"\n#include "args.h"\n' + SOURCE % 35
    assert build.load_source(source).answer() == 35


def test_the_key_covers_every_header(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, store = toolchain.available(), cache.shared_cache()
    assert tools is not None
    before = build._key(SOURCE, (), tools, store)
    for name, text in build._headers().items():
        changed = {**build._headers(), name: text + "\n"}
        with monkeypatch.context() as patch:
            patch.setattr(build, "_headers", lambda found=changed: found)
            assert build._key(SOURCE, (), tools, store) != before, name


def test_a_launcher_of_another_layout_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started before the header was replaced packs other words."""
    monkeypatch.setattr(build, "ARGS_BYTES", build.ARGS_BYTES + 8)
    spec = build.KernelSpec("forward", None, None, defines=(("TILE_M", 40),))
    with pytest.raises(CompileError, match="start Python again"):
        build.kernel(spec)


def _in_child(spec: build.KernelSpec) -> None:
    found = build.kernel(spec)
    os._exit(0 if found.attnloom_run else 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_another_thread_compiles() -> None:
    """The child has neither that thread nor the locks that it will never release."""
    spec = build.KernelSpec("forward", None, None, defines=(("TILE_M", 48),))
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with build._registry, cache_folder._lock:
            build._locks.setdefault(spec.key, threading.Lock()).acquire()
            holding.set()
            release.wait()
            build._locks[spec.key].release()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(spec,))
    child.start()
    child.join(60)
    release.set()
    thread.join()
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


def assert_ends_well(child: int) -> None:
    """A forked process exits with status 0, within a minute."""
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kernel_loaded_before_a_fork_runs_in_the_child() -> None:
    library = build.load_source(SOURCE % 36)
    child = os.fork()
    if child == 0:
        right = library.answer() == 36 and build.load_source(SOURCE % 37).answer() == 37
        os._exit(0 if right else 1)
    assert_ends_well(child)
    assert answer(36) == (36, 0)  # the child's end removed nothing of its parent's


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_after_a_kernel_ran_on_several_threads() -> None:
    """OpenMP's threads are not in the child, which would wait for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        q = torch.ones(1, 4, 512, 32)
        expected = attnloom.flex_attention(q, q, q)
        child = os.fork()
        if child == 0:
            same = attnloom.flex_attention(q, q, q)[0, 0, 0, 0] == expected[0, 0, 0, 0]
            os._exit(0 if same else 1)
        assert_ends_well(child)
        assert not threads_lost()
    finally:
        torch.set_num_threads(before)
