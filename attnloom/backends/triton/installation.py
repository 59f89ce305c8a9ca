"""What Triton asks of its own installation, found out once and not in every process.

Before it looks for a kernel on disk, Triton hashes its compiler, 0.25 s for a library of 400 MB, of
the 0.36 s that a first call in a new process took; and it starts its assembler twice to be told a
version. Here both answers are kept in files that are named after the sizes, times of change and
inodes of the files they depend on, and handed to Triton while a kernel of ours is looked up. They
decide which compiled kernel runs, so that they are read under the rules of backends/folder.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache

from attnloom.backends.folder import TrustedFolder, place
from attnloom.backends.triton.interpreter import INTERPRETED

_ROOT = Path(triton.__file__).parent
_SKIPPED = {"__pycache__", "include"}
_lock = threading.Lock()
_hashing = getattr(cache, "triton_key", None)
_compiler = sys.modules.get("triton.backends.nvidia.compiler")  # if Triton came with it
_asking = getattr(_compiler, "get_ptxas_version", None)
_FIRST_BLACKWELL = 100
_inside = 0


@contextlib.contextmanager
def hashed_once() -> Iterator[None]:
    """Inside, Triton's compiler knows the digest without reading its files, and the version of its
    assembler without starting it."""
    global _inside
    digest = None if INTERPRETED else _digest()
    if digest is None:
        yield
        return
    with _lock:
        _inside += 1
        cache.triton_key = lambda: digest
        _answer_with(_assembler_version)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                cache.triton_key = _hashing
                _answer_with(_asking)


def _answer_with(version: Any) -> None:
    """Have Triton's backend take this function's word for its assembler's version."""
    if _asking is not None:
        _compiler.get_ptxas_version = version  # type: ignore[union-attr]


@functools.cache
def _assembler_version(arch: int = 80) -> str:
    """In place of Triton's get_ptxas_version."""
    assert _asking is not None
    path = _assembler(arch)
    return _asking(arch) if path is None else kept_version(lambda: _asking(arch), path)


def _assembler(arch: int) -> Path | None:
    """The assembler that came with Triton; None if the user chose another one, or a version."""
    name = "ptxas" if arch < _FIRST_BLACKWELL else "ptxas_blackwell"
    tool = vars(type(knobs.nvidia)).get(name)
    chosen = name in vars(knobs.nvidia) or os.environ.get(getattr(tool, "key", ""))
    if chosen or knobs.nvidia.mock_ptx_version is not None or not hasattr(tool, "default_path"):
        return None
    return Path(tool.default_path)


def kept_version(asking: Callable[[], str], path: Path) -> str:
    """What a program says of its version, from its file or asked for and kept there."""
    try:
        key = hashlib.sha256(_facts(path)).hexdigest()[:32]
    except OSError:
        return asking()
    return TrustedFolder(*place()).remember(f"assembler-{key}", asking)


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


@functools.cache
def gluon_digest() -> str:
    """Of the text of Gluon's language, which Triton's digest of itself leaves out."""
    folder = _ROOT / "experimental"
    return TrustedFolder(*place()).remember(f"gluon-{stamp(folder)}", lambda: _text_of(folder))


def _text_of(folder: Path) -> str:
    """A digest of the sources in a folder, wherever that lies."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()


def stamp(root: Path) -> str:
    """Names of all sources and libraries, and what tells that one of them was changed."""
    found = hashlib.sha256(triton.__version__.encode())
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith((".py", ".so")):
                found.update(_facts(Path(folder) / name))
    return found.hexdigest()[:32]


def _facts(path: Path) -> bytes:
    """A file's name, and what tells that it was changed."""
    at = path.stat()
    facts = (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)
    return f"{path} {facts}\n".encode()
