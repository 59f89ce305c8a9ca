"""Peak resident memory of this process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Let the peak start again from what is resident now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes() -> int | None:
    """Highest resident memory so far, in bytes; None where the system does not tell."""
    # ru_maxrss would do on Linux too, but a child process starts with its parent's value there.
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Resident memory now, in bytes; None where the system does not tell."""
    return _status_bytes("VmRSS") if _STATUS.exists() else peak_bytes()


def _status_bytes(field: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
