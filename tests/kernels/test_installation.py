"""Triton's digest of itself is computed once an installation, not once a process, and never taken
from a file that somebody else could have written."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

from triton.runtime import cache

from attnloom.backends import folder as cache_folder
from attnloom.backends.triton import installation
from tests.harness.unprivileged import read_only_folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of three files, and an empty cache that nobody was warned about."""
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_warned", False)
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


@pytest.mark.skipif(installation._asking is None, reason="Triton came without NVIDIA's backend")
def test_the_assembler_is_asked_for_its_version_in_the_first_process_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler: Any = installation._compiler
    asked: list[int] = []
    assembler = root / "ptxas"
    assembler.write_text("1")

    def ask(arch: int) -> str:
        asked.append(arch)
        return "ptxas: NVIDIA (R) Ptx optimizing assembler\nrelease 12.8\n"

    monkeypatch.setattr(installation, "INTERPRETED", False)
    monkeypatch.setattr(installation, "_digest", lambda: "kept")
    monkeypatch.setattr(installation, "_assembler", lambda arch: assembler)
    monkeypatch.setattr(installation, "_asking", ask)
    monkeypatch.setattr(compiler, "get_ptxas_version", ask)
    for _ in range(3):  # processes
        installation._assembler_version.cache_clear()
        with installation.hashed_once():
            assert compiler.get_ptxas_version(90) == ask(90)
            asked.pop()
        assert compiler.get_ptxas_version is ask
    assert asked == [90]
    assembler.write_text("22")
    installation._assembler_version.cache_clear()
    with installation.hashed_once():
        compiler.get_ptxas_version(90)
    assert asked == [90, 90]
    installation._assembler_version.cache_clear()


@pytest.mark.skipif(installation._asking is None, reason="Triton came without NVIDIA's backend")
def test_another_assembler_is_asked_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    ours = installation._assembler(90)
    assert ours is not None and ours.name == "ptxas"
    assert installation._assembler(100) != ours
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere/ptxas")
    assert installation._assembler(90) is None


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
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", "~/kept")
    assert kept_by_a_new_process(counting(), root) == "digest 1"
    assert len(list((tmp_path / "kept").iterdir())) == 1


# Files that must not be believed. Each test first keeps "digest 1".


@pytest.fixture
def kept_file(root: Path) -> Path:
    digest = counting()
    assert [kept_by_a_new_process(digest, root) for _ in range(2)] == ["digest 1"] * 2
    (path,) = Path(os.environ["ATTNLOOM_CACHE_DIR"]).iterdir()
    return path


def computed_again(root: Path) -> bool:
    """Whether a new process computes the digest; it does not say so in a warning."""
    calls: list[int] = []

    @functools.lru_cache
    def digest() -> str:
        calls.append(1)
        return "digest 1"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_by_a_new_process(digest, root) == "digest 1"
    return bool(calls)


def test_a_file_that_others_can_write_is_not_believed(root: Path, kept_file: Path) -> None:
    assert not computed_again(root)
    kept_file.chmod(0o666)
    assert computed_again(root)
    assert not computed_again(root)  # it was replaced
    assert kept_file.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_not_believed(
    root: Path, kept_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is this user's, the file in it is not."""
    look = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        found = look(path, **options)
        if path != kept_file:
            return found
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

    monkeypatch.setattr(Path, "stat", stat)
    assert computed_again(root)


def test_a_link_is_not_followed_and_is_replaced(root: Path, kept_file: Path) -> None:
    elsewhere = kept_file.parent.parent / "elsewhere"
    kept_file.rename(elsewhere)
    kept_file.symlink_to(elsewhere)
    before = elsewhere.read_text()
    assert computed_again(root)
    assert not kept_file.is_symlink() and elsewhere.read_text() == before
    kept_file.unlink()
    kept_file.symlink_to(elsewhere.with_name("gone"))
    assert computed_again(root) and not computed_again(root)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:-1] + b"2",
        lambda data: b"\xff" + data,
        lambda data: data + data,
    ],
)
def test_a_damaged_file_is_not_believed(
    root: Path, kept_file: Path, damage: Callable[[bytes], bytes]
) -> None:
    kept_file.write_bytes(damage(kept_file.read_bytes()))
    assert computed_again(root)
    assert not computed_again(root)


def test_a_write_that_was_interrupted_leaves_the_old_file(
    root: Path, kept_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_file.chmod(0o666)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            kept_by_a_new_process(counting(), root)
    assert len(list(kept_file.parent.glob("new-*"))) == 1
    assert computed_again(root) and not computed_again(root)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(root: Path, kept_file: Path, mode: int) -> None:
    kept_file.parent.chmod(mode)
    digest = counting()
    digest()
    with pytest.warns(UserWarning, match="can be written by other users.*Run 'chmod go-w"):
        assert kept_by_a_new_process(digest, root) == "digest 2"
    assert kept_by_a_new_process(digest, root) == "digest 3"  # warned of once
    kept_file.parent.chmod(0o700)


def test_a_folder_of_another_user_is_not_used(
    root: Path, kept_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: kept_file.stat().st_uid + 1)
    digest = counting()
    digest()
    with pytest.warns(UserWarning, match="belongs to user .*not to you"):
        assert kept_by_a_new_process(digest, root) == "digest 2"


def test_a_folder_that_others_can_replace_is_not_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(shared / "cache"))
    with pytest.warns(UserWarning, match="where any user can replace it"):
        assert kept_by_a_new_process(counting(), root) == "digest 1"
    assert not list((shared / "cache").iterdir())


def test_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_folder.tempfile, "NamedTemporaryFile", full)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left on device"):
        assert kept_by_a_new_process(counting(), root) == "digest 1"


def test_a_home_that_is_read_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with read_only_folder() as home:
        monkeypatch.setenv("ATTNLOOM_CACHE_DIR", str(home / "cache"))
        with pytest.warns(UserWarning, match=r"cannot be used: .*Permission denied"):
            assert kept_by_a_new_process(counting(), root) == "digest 1"


def test_no_home_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ATTNLOOM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.warns(UserWarning, match="no folder for the kernel cache: Could not .* Set HOME"):
        assert kept_by_a_new_process(counting(), root) == "digest 1"


def test_two_processes_at_once(root: Path) -> None:
    """Both compute the digest; one file is left, which a third believes."""
    code = (
        "import functools, sys, time\n"
        "from pathlib import Path\n"
        "from attnloom.backends.triton import installation\n"
        "def digest():\n"
        "    time.sleep(1)\n"
        "    return 'digest 1'\n"
        "sys.stdout.write(installation.kept(functools.lru_cache(digest), Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, str(root)]
    processes = [
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0] for p in processes] == ["digest 1"] * 2
    assert len(list(Path(os.environ["ATTNLOOM_CACHE_DIR"]).iterdir())) == 1
    assert not computed_again(root)
