"""Compiled kernels on disk, shared by processes.

    <folder>/<key>/kernel.so, sha256, kernel.cpp     one folder a kernel, renamed into place whole

The folder is ATTNLOOM_CACHE_DIR, or `attnloom` in the user's cache folder. Loading a shared object
runs it, so the folder and every entry must belong to this user and be writable by nobody else, and
an entry must have the digest that was recorded for it; else it is built again. Where the folder
cannot be used (read-only, full, not trusted), kernels live in a private temporary folder until the
process ends, and one warning says so.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from attnloom.errors import CacheError

# Changes when the layout of the cache or the interface of kernels does.
FORMAT = "1"
KERNEL = "kernel.so"
_DIGEST = "sha256"
_lock = threading.Lock()
_warned = False


def default_folder() -> Path:
    """Where kernels are kept; it need not exist."""
    chosen = os.environ.get("ATTNLOOM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "attnloom"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attnloom"


def check_trusted(path: Path) -> None:
    """Raise unless `path` belongs to this user and nobody else can write to it.

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


class KernelCache:
    """Kernels in one folder.

    folder: created when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._usable: bool | None = None

    def find(self, key: str) -> Path | None:
        """The kernel of `key`, if it is there, trusted and intact."""
        if not self._open(create=False):
            return None
        entry = self.folder / key
        try:
            for path in (entry, entry / KERNEL):
                check_trusted(path)
            expected = (entry / _DIGEST).read_text().strip()
            intact = _digest(entry / KERNEL) == expected
        except (OSError, CacheError, UnicodeDecodeError):
            return None
        return entry / KERNEL if intact else None

    def add(self, key: str, built: Path) -> Path:
        """Copy a built kernel's folder into the cache, and return the kernel to load.

        A failure to write is no error: the kernel is then used where it was built.
        """
        if not self._open(create=True):
            return built
        entry = self.folder / key
        try:
            self._place(entry, built)
        except OSError as error:
            self._give_up(f"the kernel cache '{self.folder}' cannot be written: {error}.")
            return built
        return self.find(key) or built

    def remember(self, key: str, compute: Callable[[], str]) -> str:
        """A short text that is expensive to find out, kept under `key`."""
        path = self.folder / key
        if self._open(create=False):
            try:
                check_trusted(path)
                return path.read_text()
            except (OSError, CacheError, UnicodeDecodeError):
                pass
        text = compute()
        if self._open(create=True):
            try:
                with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                    file.write(text)
                Path(file.name).replace(path)
            except OSError as error:
                self._give_up(f"the kernel cache '{self.folder}' cannot be written: {error}.")
        return text

    def _place(self, entry: Path, built: Path) -> None:
        """Rename a complete copy to `entry`; of two processes either copy will do."""
        staging = Path(tempfile.mkdtemp(prefix="new-", dir=self.folder))
        try:
            for file in built.parent.iterdir():
                shutil.copyfile(file, staging / file.name)
            (staging / _DIGEST).write_text(_digest(built))
            if entry.exists() and self.find(entry.name) is None:
                broken = Path(tempfile.mkdtemp(prefix="old-", dir=self.folder))
                entry.rename(broken / "entry")
                shutil.rmtree(broken, ignore_errors=True)
            try:
                staging.rename(entry)
            except OSError:
                if self.find(entry.name) is None:  # else another process was first
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _open(self, create: bool) -> bool:
        """Whether the folder may be used; decided once, the reason is warned about."""
        if self._usable is not None:
            return self._usable
        try:
            if not self.folder.exists():
                if not create:
                    return False
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_trusted(self.folder)
        except CacheError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(f"the kernel cache '{self.folder}' cannot be used: {error}.")
        else:
            self._usable = True
        return bool(self._usable)

    def _give_up(self, reason: str) -> None:
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


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def temporary_folder() -> Path:
    """A folder that only this user can read, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="attnloom-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a child that inherited the folder by fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def shared_cache() -> KernelCache:
    """The cache of this process, in `default_folder()` as it is when first asked for."""
    return KernelCache(default_folder())
