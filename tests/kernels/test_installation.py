"""Triton's digest of itself is computed once an installation, not once a process."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

from triton.runtime import cache

from attnloom.backends.triton import disk, installation


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of three files."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "cache"))
    found = tmp_path / "triton"
    (found / "_C").mkdir(parents=True)
    for name in ("__init__.py", "compiler.py", "_C/libtriton.so"):
        (found / name).write_text("x = 1")
    return found


def counting() -> Any:
    calls: list[int] = []

    @functools.lru_cache
    def digest() -> str:
        calls.append(1)
        return f"digest {len(calls)}"

    return digest


def kept_by_a_new_process(digest: Any, root: Path) -> str:
    digest.cache_clear()
    return installation.kept(digest, root)


def test_the_second_process_reads_what_the_first_computed(root: Path) -> None:
    digest = counting()
    assert [kept_by_a_new_process(digest, root) for _ in range(3)] == ["digest 1"] * 3


@pytest.mark.parametrize("name", ["compiler.py", "_C/libtriton.so"])
def test_a_change_of_the_installation_is_seen(root: Path, name: str) -> None:
    """Also one of equal size, and one that keeps the time of the last write, as `cp -p` does."""
    digest = counting()
    assert kept_by_a_new_process(digest, root) == "digest 1"
    at = (root / name).stat()
    (root / name).write_text("x = 2")
    os.utime(root / name, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert kept_by_a_new_process(digest, root) == "digest 2"
    (root / "more.py").write_text("")
    assert kept_by_a_new_process(digest, root) == "digest 3"


def test_triton_sees_the_digest_inside_alone_also_with_threads() -> None:
    original = cache.triton_key
    inside = threading.Barrier(3)
    seen: list[str] = []

    def look() -> None:
        with installation.hashed_once():
            inside.wait()
            seen.append(cache.triton_key())
            inside.wait()

    with (
        mock.patch.object(installation, "_digest", lambda: "kept"),
        mock.patch.object(installation, "INTERPRETED", False),
    ):
        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == ["kept"] * 3
    assert cache.triton_key is original


@pytest.mark.slow
def test_the_digest_is_tritons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(installation, "INTERPRETED", False)
    installation._digest.cache_clear()
    for _ in range(2):  # computed, then read
        with installation.hashed_once():
            assert cache.triton_key() == installation._hashing()
        installation._digest.cache_clear()


def test_a_cache_folder_below_home_was_taken_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", "~/kept")
    assert disk.folder("fragments") == tmp_path / "kept" / "fragments"
