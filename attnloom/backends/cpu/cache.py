"""Compiled kernels on disk, shared by processes.

    <folder>/<key>/kernel.so, kernel.cpp, sha256     one folder a kernel, renamed into place whole

Which folder, and when it is used: see backends/folder.py. Loading a shared object runs it, so every
entry too must belong to this user and be writable by nobody else, and it must have the digest that
was recorded for it; else it is built again. An entry appears only after its kernel has been loaded
once, by a rename: what a killed process, a full disk or a broken compiler leaves is never taken for
a kernel. Where the folder cannot be used, kernels are built in a private temporary folder and live
as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attnloom.backends.folder import STAGING, TrustedFolder, check_trusted, place
from attnloom.errors import CacheError

# Changes when the layout of the cache or the interface of kernels does.
FORMAT = "2"
KERNEL = "kernel.so"
_SOURCE = "kernel.cpp"
_DIGEST = "sha256"
_REPLACED = "old-"
_ABANDONED_S = 24 * 3600  # a staging folder of this age has no process any more
_PROBE_BYTES = 1 << 20


class KernelCache(TrustedFolder):
    """Kernels in one folder."""

    def find(self, key: str) -> Path | None:
        """The kernel of `key`, if it is there, trusted and intact."""
        folder = self.open(create=False)
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
        folder = self.open(create=False)
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
            self.cannot_write(error)

    def can_be_written(self, staging: Path) -> bool:
        """Whether a file of some size still fits; if not, the cache is not used from then on."""
        if self.folder is None or staging.parent != self.folder:
            return True
        try:
            (staging / "probe").write_bytes(bytes(_PROBE_BYTES))
        except OSError as error:
            self.cannot_write(error)
            return False
        return True

    def _make_staging(self) -> Path | None:
        folder = self.open(create=True)
        if folder is None:
            return None
        try:
            return Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
        except OSError as error:
            self.cannot_write(error)
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


def _remove_abandoned(folder: Path) -> None:
    """What processes that were killed while they built have left."""
    now = time.time()
    for path in folder.iterdir():
        if path.name.startswith((STAGING, _REPLACED)):
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
    return KernelCache(*place())
