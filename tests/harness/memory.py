"""How much memory a stretch of code needed at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Growth:
    """bytes: peak resident memory inside the block, less what was resident before it."""

    bytes: int = 0


@contextlib.contextmanager
def peak_growth() -> Iterator[Growth]:
    """Measure the code inside; the result is filled in at the end.

    On Linux the kernel's high-water mark is reset first, and glibc gives back what it keeps of
    freed memory: what is taken from there again would not show. Elsewhere the mark only ever rises,
    so that growth below an earlier peak goes unseen.
    """
    growth = Growth()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    yield growth
    growth.bytes = _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found:
            return int(found.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
