"""Triton's digest of its own installation, computed once and not in every process.

Before it looks for a kernel on disk, Triton hashes its compiler: 0.25 s for a library of 400 MB, of
the 0.36 s that a first call in a new process took. Here the digest is kept in a file that is named
after the sizes, times of change and inodes of the files it is made of, and handed to Triton while a
kernel of ours is looked up. It decides which compiled kernel runs, so that it is read under the
rules of backends/folder.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.runtime import cache

from attnloom.backends.folder import TrustedFolder, place
from attnloom.backends.triton.config import INTERPRETED

_ROOT = Path(triton.__file__).parent
_SKIPPED = {"__pycache__", "include"}
_lock = threading.Lock()
_hashing = getattr(cache, "triton_key", None)
_inside = 0


@contextlib.contextmanager
def hashed_once() -> Iterator[None]:
    """Inside, Triton's compiler knows the digest without reading its files."""
    global _inside
    digest = None if INTERPRETED else _digest()
    if digest is None:
        yield
        return
    with _lock:
        _inside += 1
        cache.triton_key = lambda: digest
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                cache.triton_key = _hashing


@functools.cache
def _digest() -> str | None:
    """What `triton_key` returns; None for versions of Triton that do it otherwise, and where its
    files cannot be read."""
    if _hashing is None or not hasattr(_hashing, "cache_info"):
        return None
    try:
        return kept(_hashing, _ROOT)
    except OSError:
        return None


def kept(hashing: functools._lru_cache_wrapper[str], root: Path) -> str:
    """The digest of an installation, from its file or computed and kept there."""
    return TrustedFolder(*place()).remember(f"triton-{stamp(root)}", hashing)


def stamp(root: Path) -> str:
    """Names of all sources and libraries, and what tells that one of them was changed."""
    found = hashlib.sha256(triton.__version__.encode())
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith((".py", ".so")):
                place = Path(folder) / name
                at = place.stat()
                facts = (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)
                found.update(f"{place} {facts}\n".encode())
    return found.hexdigest()[:32]
