"""The folder on disk in which kernels, and facts about compilers, outlive a process.

It is ATTNLOOM_CACHE_DIR, or `attnloom` in the user's cache folder. What is read from it decides
which code runs, so that it and all that is read from it must belong to this user and be writable by
nobody else, and lie where nobody can put another folder in its place; a link in it is not followed.
Where the folder cannot be used (read-only, full, not trusted, no home), nothing is kept, and one
warning says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from attnloom.errors import CacheError

STAGING = "new-"  # names of what is not complete yet begin so
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


def check_parents(folder: Path) -> None:
    """Raise if somebody else could put another folder in this one's place; it need not exist.

    Raises:
        CacheError: someone can. OSError: a folder above it cannot be looked at.
    """
    for parent in folder.resolve().parents:
        if not parent.exists():
            continue
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"the kernel cache '{folder}' lies in '{parent}', where any user can replace it "
                "by a folder of theirs. Set ATTNLOOM_CACHE_DIR to a folder of your own."
            )


class TrustedFolder:
    """A folder that is used if it can be trusted.

    folder: created when first written to; None if there is none, for the reason given.
    """

    def __init__(self, folder: Path | None, reason: str = "") -> None:
        self.folder = folder
        self._reason = reason
        self._usable: bool | None = None

    def remember(self, key: str, compute: Callable[[], str]) -> str:
        """A short text that is expensive to find out, kept under `key`."""
        kept = self._read(key)
        if kept is not None:
            return kept
        text = compute()
        folder = self.open(create=True)
        if folder is not None:
            try:
                _write_whole(folder / key, f"{_digest(text)}\n{text}")
            except OSError as error:
                self.cannot_write(error)
        return text

    def open(self, create: bool) -> Path | None:
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
            check_parents(self.folder)
        except CacheError as error:
            self.give_up(str(error))
        except OSError as error:
            self.give_up(f"the kernel cache '{self.folder}' cannot be used: {error}.")
        else:
            self._usable = True
            return self.folder
        return None

    def cannot_write(self, error: OSError) -> None:
        """Give up because of an error of the file system."""
        self.give_up(f"the kernel cache '{self.folder}' cannot be written: {error}.")

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

    def _read(self, key: str) -> str | None:
        """The text under `key`, if it is there, trusted and as it was written."""
        folder = self.open(create=False)
        if folder is None:
            return None
        path = folder / key
        try:
            if path.is_symlink():
                return None  # we write none, and it may lead anywhere
            check_trusted(path)
            digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        except (OSError, CacheError, UnicodeDecodeError):
            return None
        return text if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_whole(path: Path, text: str) -> None:
    """Write a file that other processes see complete or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="", prefix=STAGING, dir=path.parent, delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def place() -> tuple[Path | None, str]:
    """`default_folder()`, or None and why there is none: what a TrustedFolder is made of."""
    try:
        return default_folder(), ""
    except RuntimeError as error:
        return (
            None,
            f"there is no folder for the kernel cache: {error} Set HOME or ATTNLOOM_CACHE_DIR.",
        )


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked off."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
