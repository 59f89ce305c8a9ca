"""From the programs of a call to a loaded kernel: compose the source, fetch or compile it, load it.

One build holds one kernel file (forward, decode or backward), so that inference never compiles a
backward. The source is the prelude, the generated fragments and the kernel; its hash, with the
headers, the flags, the compiler and the CPU, is the kernel's name in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from attnloom.backends.cpu import cache, toolchain
from attnloom.backends.cpu.emit import emit_fragments
from attnloom.backends.cpu.launch_args import ARGS_BYTES
from attnloom.backends.cpu.toolchain import Toolchain
from attnloom.errors import CacheError, CompileError
from attnloom.ir.node import Program
from attnloom.stats import count

KERNELS = Path(__file__).parent / "kernels"
_PRELUDE = ("simd.h", "args.h", "lanes.h", "vecmath.h", "capture.h")


@dataclass(frozen=True)
class KernelSpec:
    """All that a kernel is compiled for.

    kernel: name of the file in kernels/, without suffix. `backward` gets score_grad.
    real: "float" or "double". wide_ints: 64-bit integer lanes.
    defines: macros of the kernel file.
    target: flags of the instruction sets to compile for; None means this machine's.
    """

    kernel: str
    score: Program | None
    mask: Program | None
    real: str = "float"
    wide_ints: bool = False
    exact_math: bool = False
    defines: tuple[tuple[str, int], ...] = ()
    target: tuple[str, ...] | None = None

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for specs that need the same kernel."""
        score = None if self.score is None else self.score.digest
        mask = None if self.mask is None else self.mask.digest
        options = (self.real, self.wide_ints, self.exact_math, self.defines, self.target)
        return (self.kernel, score, mask, *options)


_loaded: dict[tuple[object, ...], ctypes.CDLL] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}
_registry = threading.Lock()


def kernel(spec: KernelSpec) -> ctypes.CDLL:
    """The loaded kernel of a spec. Threads that ask for the same one at once compile it once.

    Raises:
        CompileError: there is no compiler, or it refused.
        CacheError: there is no folder to compile in.
    """
    found = _loaded.get(spec.key)
    if found is not None:
        return found
    with _registry:
        lock = _locks.setdefault(spec.key, threading.Lock())
    with lock:
        found = _loaded.get(spec.key)
        if found is None:
            found = _loaded[spec.key] = _load(compose(spec), spec.target)
    return found


def compose(spec: KernelSpec) -> str:
    """The complete C++ source of a kernel, but for the headers that it includes."""
    fragments = emit_fragments(
        spec.score,
        spec.mask,
        real=spec.real,
        wide_ints=spec.wide_ints,
        exact_math=spec.exact_math,
        gradient=spec.kernel == "backward",
    )
    defines = (
        ("REAL_IS_DOUBLE", int(spec.real == "double")),
        ("WIDE_INTS", int(spec.wide_ints)),
        ("ARGS_BYTES", ARGS_BYTES),
        *spec.defines,
    )
    lines = [f"#define {name} {value}" for name, value in defines]
    lines += [f'#include "{name}"' for name in _PRELUDE]
    lines += [fragments.text, f'#include "{spec.kernel}.cpp"', ""]
    return "\n".join(lines)


def load_source(source: str, target: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Compile C++ text that includes the headers of kernels/, or fetch it from the cache, and load
    it."""
    return _load(source, target)


def _load(source: str, target: tuple[str, ...] | None) -> ctypes.CDLL:
    tools = toolchain.available()
    if tools is None:
        raise CompileError(
            "backend 'cpu' needs a C++ compiler, and none was found. Install g++ or clang, set "
            "CXX, or run 'pip install ziglang', which carries one; or use "
            'kernel_options={"backend": "tiled"}, which needs none.'
        )
    flags = tools.flags(target)
    store = cache.shared_cache()
    key = _key(source, flags, tools, store)
    handle = _open(store, key)
    if handle is None:
        try:
            handle = _build(source, flags, tools, store, key)
        except _CacheFullError:  # the next staging folder lies elsewhere
            handle = _build(source, flags, tools, store, key)
    count("kernels_loaded")
    return handle


def _open(store: cache.KernelCache, key: str) -> ctypes.CDLL | None:
    """The kernel of the cache, loaded."""
    path = store.find(key)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # the cache may be on a file system that cannot execute
        if store.find(key) is not None:  # else the entry was removed just now
            store.give_up(f"a kernel in the cache '{store.folder}' cannot be loaded: {error}.")
        return None


class _CacheFullError(Exception):
    """The compiler failed where nothing can be written any more."""


def _build(
    source: str, flags: tuple[str, ...], tools: Toolchain, store: cache.KernelCache, key: str
) -> ctypes.CDLL:
    """Compile and load a kernel, then keep it: what cannot be loaded never enters the cache."""
    with store.staging() as folder:
        include = folder / "include"
        output = folder / cache.KERNEL
        try:
            include.mkdir()
            for name, text in _headers().items():
                (include / name).write_text(text, encoding="utf-8")
            tools.compile(source, output, flags, include)
        except (CompileError, OSError) as error:
            if not store.can_be_written(folder):
                raise _CacheFullError from error
            if isinstance(error, CompileError):
                raise
            raise CacheError(
                f"a kernel cannot be compiled in '{folder}': {error}. Set TMPDIR, or "
                "ATTNLOOM_CACHE_DIR, to a folder with room."
            ) from error
        count("kernels_compiled")
        try:
            handle = ctypes.CDLL(str(output))
        except OSError as error:
            raise CompileError(
                f"the C++ compiler {tools.name} made a kernel that cannot be loaded: {error}. It "
                "must compile for this machine, and the folder must allow programs to run. Unset "
                "CXX or set it to g++ or clang++, or set ATTNLOOM_CACHE_DIR to another folder."
            ) from error
        store.publish(key, folder)
    return handle


def _key(source: str, flags: tuple[str, ...], tools: Toolchain, store: cache.KernelCache) -> str:
    identity = hashlib.sha256(tools.identity.encode()).hexdigest()[:16]
    version = store.remember(f"compiler-{identity}", tools.version)
    headers = "\0".join(f"{name}\0{text}" for name, text in _headers().items())
    parts = (cache.FORMAT, source, headers, *flags, tools.identity, version, tools.cpu)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


@functools.cache
def _headers() -> dict[str, str]:
    """Name -> text of the files that a source may include.

    Read once: what is compiled is then what the key says, also while an upgrade replaces them.
    """
    found = sorted(path for path in KERNELS.iterdir() if path.suffix in (".h", ".cpp"))
    return {path.name: path.read_text(encoding="utf-8") for path in found}


def _after_fork() -> None:
    """Threads that held a lock when this process was forked off do not exist in it."""
    global _registry
    _registry = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
