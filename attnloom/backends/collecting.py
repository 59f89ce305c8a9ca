"""Python's garbage collector waits while a first call imports and compiles.

Both make hundreds of thousands of objects that stay, for which the collector looks through every
object of the process: 0.1 s once torch is imported, to find nothing. What is made meanwhile is
looked at afterwards, as anything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, nothing is collected by itself; somebody who has turned that off keeps it so."""
    global _inside
    with _lock:
        ours = _inside > 0 or gc.isenabled()
        if ours:
            _inside += 1
            gc.disable()
    try:
        yield
    finally:
        if ours:
            with _lock:
                _inside -= 1
                if not _inside:
                    gc.enable()


def _after_fork() -> None:
    """Another thread may have been inside, or held the lock, when this process was forked off."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside:
        _inside = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
