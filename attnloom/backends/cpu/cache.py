"""Compiled kernels on disk, shared by processes.

    <folder>/<key>/kernel.so, kernel.cpp, sha256     one folder a kernel, renamed into place whole

The folder is ATTNLOOM_CACHE_DIR, or `attnloom` in the user's cache folder. Loading a shared object
runs it, so the folder and every entry must belong to this user and be writable by nobody else, and
an entry must have the digest that was recorded for it; else it is built again. An entry appears
only after its kernel has been loaded once, by a rename: what a killed process, a full disk or a
broken compiler leaves is never taken for a kernel. Where the folder cannot be used (read-only,
full, not trusted, no home), kernels are built in a private temporary folder and live as long as the
process, and one warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from attnloom.errors import CacheError

# Changes when the layout of the cache or the interface of kernels does.
FORMAT = "2"
KERNEL = "kernel.so"
_SOURCE = "kernel.cpp"
_DIGEST = "sha256"
_STAGING = "new-"
_REPLACED = "old-"
_ABANDONED_S = 24 * 3600  # a staging folder of this age has no process any more
_PROBE_BYTES = 1 << 20
_lock = threading.Lock()
_warned = False


def default_folder() -> Path:
    """Where kernels are kept; it need not exist.

    Raises:
        RuntimeError: this user has no home folder, and the environment names no other.
    """
    chosen = os.environ.get("ATTNLOOM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "attnloom"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "attnloom"


def check_trusted(path: Path) -> None:
    """Raise unless `path` belongs to this user and nobody else can write to it or replace it.

    Raises:
        CacheError: it does not, or someone can. OSError: it cannot be looked at.
    """
    status = path.stat()
    if status.st_uid != os.getuid():
        raise CacheError(
            f"the kernel cache '{path}' belongs to user {status.st_uid}, not to you "
            f"({os.getuid()}); loading a kernel from it would run that user's code. Set "
            "ATTNLOOM_CACHE_DIR to a folder of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"the kernel cache '{path}' can be written by other users, who could place code in it. "
            f"Run 'chmod go-w {path}' after checking its contents, or set ATTNLOOM_CACHE_DIR to a "
            "folder of your own."
        )


def _check_parents(folder: Path) -> None:
    """Raise if somebody else could put another folder in this one's place."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"the kernel cache '{folder}' lies in '{parent}', where any user can replace it "
                "by a folder of theirs. Set ATTNLOOM_CACHE_DIR to a folder of your own."
            )


class KernelCache:
    """Kernels in one folder.

    folder: created when first written to; None if there is none, for the reason given.
    """

    def __init__(self, folder: Path | None, reason: str = "") -> None:
        self.folder = folder
        self._reason = reason
        self._usable: bool | None = None

    def find(self, key: str) -> Path | None:
        """The kernel of `key`, if it is there, trusted and intact."""
        folder = self._open(create=False)
        if folder is None:
            return None
        entry = folder / key
        try:
            for path in (entry, entry / KERNEL):
                if path.is_symlink():
                    return None  # no entry has one, and it may lead anywhere
                check_trusted(path)
            expected = (entry / _DIGEST).read_text().strip()
            intact = _digest(entry / KERNEL) == expected
        except (OSError, CacheError, UnicodeDecodeError):
            return None
        return entry / KERNEL if intact else None

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder to build a kernel in, which only this user can enter; gone afterwards.

        It lies in the cache, where `publish` can rename it to an entry, or else in the temporary
        folder.

        Raises:
            CacheError: there is no folder that can be written to.
        """
        folder = self._make_staging() or _temporary_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, key: str, staging: Path) -> None:
        """Make a built kernel the entry of `key`. A failure to write is no error."""
        folder = self._open(create=False)
        if folder is None or staging.parent != folder:
            return
        try:
            for path in staging.iterdir():
                if path.name not in (KERNEL, _SOURCE):
                    _remove(path)
            for name in (KERNEL, _SOURCE):
                (staging / name).chmod(0o600)  # whatever the umask lets others write
            (staging / _DIGEST).write_text(_digest(staging / KERNEL))
            self._place(folder / key, staging)
            _remove_abandoned(folder)
        except OSError as error:
            self.give_up(f"the kernel cache '{folder}' cannot be written: {error}.")

    def remember(self, key: str, compute: Callable[[], str]) -> str:
        """A short text that is expensive to find out, kept under `key`."""
        folder = self._open(create=False)
        if folder is not None:
            path = folder / key
            try:
                if not path.is_symlink():
                    check_trusted(path)
                    return path.read_text(encoding="utf-8")
            except (OSError, CacheError, UnicodeDecodeError):
                pass
        text = compute()
        folder = self._open(create=True)
        if folder is not None:
            try:
                _write_whole(folder / key, text)
            except OSError as error:
                self.give_up(f"the kernel cache '{folder}' cannot be written: {error}.")
        return text

    def can_be_written(self, staging: Path) -> bool:
        """Whether a file of some size still fits; if not, the cache is not used from then on."""
        if self.folder is None or staging.parent != self.folder:
            return True
        try:
            (staging / "probe").write_bytes(bytes(_PROBE_BYTES))
        except OSError as error:
            self.give_up(f"the kernel cache '{self.folder}' cannot be written: {error}.")
            return False
        return True

    def give_up(self, reason: str) -> None:
        """Do not use the folder any more, and warn of the reason, once in a process."""
        global _warned
        self._usable = False
        with _lock:
            first, _warned = not _warned, True
        if first:
            warnings.warn(
                f"{reason} Kernels are compiled again in every process until that is fixed.",
                UserWarning,
                stacklevel=2,
            )

    def _make_staging(self) -> Path | None:
        folder = self._open(create=True)
        if folder is None:
            return None
        try:
            return Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        except OSError as error:
            self.give_up(f"the kernel cache '{folder}' cannot be written: {error}.")
            return None

    def _place(self, entry: Path, staging: Path) -> None:
        """Rename `staging` to `entry`; of two processes either kernel will do."""
        if os.path.lexists(entry) and self.find(entry.name) is None:
            broken = Path(tempfile.mkdtemp(prefix=_REPLACED, dir=entry.parent))
            with contextlib.suppress(FileNotFoundError):  # another process did the same
                entry.rename(broken / "entry")
            shutil.rmtree(broken, ignore_errors=True)
        try:
            staging.rename(entry)
        except OSError:
            if self.find(entry.name) is None:  # else another process was first
                raise

    def _open(self, create: bool) -> Path | None:
        """The folder, if it may be used; decided once, the reason is warned about."""
        if self._usable is not None:
            return self.folder if self._usable else None
        if self.folder is None:
            self.give_up(self._reason)
            return None
        try:
            if not self.folder.exists():
                if not create:
                    return None
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_trusted(self.folder)
            _check_parents(self.folder)
        except CacheError as error:
            self.give_up(str(error))
        except OSError as error:
            self.give_up(f"the kernel cache '{self.folder}' cannot be used: {error}.")
        else:
            self._usable = True
            return self.folder
        return None


def _write_whole(path: Path, text: str) -> None:
    """Write a file that other processes see complete or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix=_STAGING, dir=path.parent, delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def _remove_abandoned(folder: Path) -> None:
    """What processes that were killed while they built have left."""
    now = time.time()
    for path in folder.iterdir():
        if path.name.startswith((_STAGING, _REPLACED)):
            with contextlib.suppress(OSError):  # another process may do the same
                if now - path.lstat().st_mtime > _ABANDONED_S:
                    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="attnloom-"))
    except OSError as error:
        raise CacheError(
            f"there is no folder to compile a kernel in: {error}. Set TMPDIR, or "
            "ATTNLOOM_CACHE_DIR, to a folder that you can write to."
        ) from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def shared_cache() -> KernelCache:
    """The cache of this process, in `default_folder()` as it is when first asked for."""
    try:
        return KernelCache(default_folder())
    except RuntimeError as error:
        return KernelCache(
            None,
            f"there is no folder for the kernel cache: {error} Set HOME or ATTNLOOM_CACHE_DIR.",
        )


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked off."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
