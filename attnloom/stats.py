"""Counters of what the compiler did in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class CompileStats:
    """A snapshot of the counters.

    traces: times a mod was traced. A mod that the fast path recognised does not count.
    kernels_compiled: kernels that a compiler was run for. Those of a backward may be compiled, and
        count, while the forward runs.
    kernels_loaded: kernels loaded into the process, freshly compiled or from the cache on disk.
    fallbacks: calls that "auto" gave to a slower backend than the best one for the device.
    """

    traces: int = 0
    kernels_compiled: int = 0
    kernels_loaded: int = 0
    fallbacks: int = 0


_LOCK = threading.Lock()
_NAMES = tuple(f.name for f in fields(CompileStats))
_counts = dict.fromkeys(_NAMES, 0)


def compile_stats() -> CompileStats:
    """The counters since the process started or `reset_compile_stats` was called.

    Two snapshots around a call tell what it cost: a repeated call neither traces nor compiles.

    Returns:
        A frozen snapshot; all threads count into the same numbers.
    """
    with _LOCK:
        return CompileStats(**_counts)


def reset_compile_stats() -> None:
    """Set every counter of `compile_stats` to zero. Caches keep what they hold."""
    with _LOCK:
        _counts.update(dict.fromkeys(_NAMES, 0))


def count(name: str, amount: int = 1) -> None:
    """Add to one counter; `name` is a field of CompileStats."""
    if name not in _counts:
        raise KeyError(f"no counter is called '{name}'")
    with _LOCK:
        _counts[name] += amount
