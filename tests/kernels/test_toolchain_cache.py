"""Kernels on disk: shared by processes, never loaded unless trusted and intact."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnloom.backends import folder as cache_folder
from attnloom.backends.cpu import build, cache
from attnloom.backends.cpu.cache import KernelCache
from attnloom.errors import CacheError
from attnloom.stats import compile_stats, reset_compile_stats

SOURCE = 'extern "C" int answer() { return %d; }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for this process."""
    chosen = tmp_path / "cache"
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(chosen))
    monkeypatch.setattr(cache_folder, "_warned", False)
    cache.shared_cache.cache_clear()
    yield chosen
    cache.shared_cache.cache_clear()


def answer(number: int) -> tuple[int, int]:
    """What the kernel says, and how often the compiler ran."""
    reset_compile_stats()
    library = build.load_source(SOURCE % number)
    return library.answer(), compile_stats().kernels_compiled


def entries(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir()]


def another_process(number: int) -> subprocess.Popen[str]:
    script = (
        "from attnloom.backends.cpu.build import load_source\n"
        "from attnloom.stats import compile_stats\n"
        f"print(load_source({SOURCE % number!r}).answer(), compile_stats().kernels_compiled)\n"
    )
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script], cwd=root, stdout=subprocess.PIPE, text=True
    )


def test_compiled_once(folder: Path) -> None:
    assert answer(7) == (7, 1)
    cache.shared_cache.cache_clear()
    assert answer(7) == (7, 0)


def test_two_processes_at_once(folder: Path) -> None:
    processes = [another_process(8), another_process(8)]
    assert all(p.communicate()[0].split()[0] == "8" for p in processes)
    assert len(entries(folder)) == 1
    assert answer(8) == (8, 0)


@pytest.mark.parametrize("name", ["kernel.so", "sha256"])
def test_damaged_entry_is_built_again(folder: Path, name: str) -> None:
    assert answer(9) == (9, 1)
    (entry,) = entries(folder)
    damaged = folder / "damaged"  # a new file: the old one is mapped into this process
    damaged.write_bytes((entry / name).read_bytes()[:-7] + b"damaged")
    damaged.replace(entry / name)
    assert answer(9) == (9, 1)
    assert answer(9) == (9, 0)
    assert len(entries(folder)) == 1


def test_folder_others_can_write_is_not_used(folder: Path) -> None:
    assert answer(10) == (10, 1)
    folder.chmod(0o777)
    cache.shared_cache.cache_clear()
    with pytest.warns(UserWarning, match="can be written by other users.*Run 'chmod go-w"):
        assert answer(10) == (10, 1)


def test_entry_others_can_write_is_not_loaded(folder: Path) -> None:
    assert answer(11) == (11, 1)
    (entries(folder)[0] / "kernel.so").chmod(0o666)
    assert answer(11) == (11, 1)


def test_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CacheError, match=r"belongs to user .*not to you.*Set ATTNLOOM_CACHE_DIR"):
        cache_folder.check_trusted(tmp_path)


def test_folder_that_cannot_be_written_warns_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    make = cache.tempfile.mkdtemp

    def full(prefix: str, dir: Path | None = None) -> str:  # noqa: A002
        if dir == folder:
            raise OSError(28, "No space left on device")
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", full)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left on device"):
        assert answer(12) == (12, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(13) == (13, 1)


def test_folder_that_cannot_be_made(folder: Path) -> None:
    folder.write_text("a file is in the way")
    with pytest.warns(UserWarning, match="Kernels are compiled again in every process"):
        assert answer(14) == (14, 1)


def test_key_covers_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = build.toolchain.available()
    assert tools is not None
    store = KernelCache(folder)
    base = build._key("source", ("-O3",), tools, store)
    assert base == build._key("source", ("-O3",), tools, store)
    other_cpu = build.Toolchain(tools.command, tools.name, tools.identity, "another cpu")
    other_compiler = build.Toolchain(tools.command, tools.name, "newer", tools.cpu)
    keys = {
        base,
        build._key("source 2", ("-O3",), tools, store),
        build._key("source", ("-O2",), tools, store),
        build._key("source", ("-O3",), other_cpu, store),
        build._key("source", ("-O3",), other_compiler, store),
    }
    monkeypatch.setattr(cache, "FORMAT", "next")
    keys.add(build._key("source", ("-O3",), tools, store))
    assert len(keys) == 6


def test_known_compiler_is_not_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(15) == (15, 1)

    def run(*args: object) -> None:
        raise AssertionError("the compiler ran")

    monkeypatch.setattr(build.Toolchain, "_run", run)
    cache.shared_cache.cache_clear()
    assert answer(15) == (15, 0)


def test_threads_compile_a_variant_once(folder: Path) -> None:
    spec = build.KernelSpec("forward", None, None, defines=(("TILE_M", 32),))
    build._loaded.pop(spec.key, None)
    reset_compile_stats()
    found: list[ctypes.CDLL] = []
    threads = [threading.Thread(target=lambda: found.append(build.kernel(spec))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compile_stats().kernels_compiled == 1
    assert len(found) == 4 and len({id(f) for f in found}) == 1


def test_default_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLOOM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder.default_folder() == Path("/somewhere/attnloom")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder.default_folder() == Path.home() / "Library" / "Caches" / "attnloom"
