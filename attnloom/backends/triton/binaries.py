"""Of a kernel of ours, the cache on disk has the binary and what is known of it, no text.

Triton also stores what each stage of the compiler makes, 1.5 to 4 MB for a Hopper kernel, and reads
all of it in every process that finds the kernel. `TRITON_STORE_BINARY_ONLY` decides where it is
set, to 0 for somebody who wants to read PTX.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from triton import knobs

_NAME = "store_binary_only"
_lock = threading.Lock()
_inside = 0


@contextlib.contextmanager
def binaries_alone() -> Iterator[None]:
    """Inside, kernels are stored so, unless the user has said how."""
    global _inside
    # Assigning to a knob would also set the environment of child processes.
    chosen = vars(knobs.compilation)
    with _lock:
        ours = _inside > 0 or (_NAME not in chosen and not _is_set())
        if ours:
            _inside += 1
            chosen[_NAME] = True
    try:
        yield
    finally:
        if ours:
            with _lock:
                _inside -= 1
                if not _inside:
                    chosen.pop(_NAME, None)


def _is_set() -> bool:
    return "TRITON_STORE_BINARY_ONLY" in os.environ


def _after_fork() -> None:
    """Another thread may have been inside, or held the lock, when this process was forked off."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside:
        _inside = 0
        vars(knobs.compilation).pop(_NAME, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
