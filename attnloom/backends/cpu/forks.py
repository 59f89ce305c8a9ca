"""Whether this process was forked off one whose threads it would wait for.

A forked process has a copy of OpenMP's state and none of its threads. A region of more than one
thread then waits for ever, as torch's own operators do there.
"""

from __future__ import annotations

import os
from pathlib import Path


class _Forks:
    """running: the parent had more than one thread as it forked. lost: so did an ancestor."""

    running = False
    lost = False


def threads_lost() -> bool:
    """Whether kernels must run on the calling thread alone."""
    return _Forks.lost


def _before_fork() -> None:
    try:
        _Forks.running = len(list(Path("/proc/self/task").iterdir())) > 1
    except OSError:  # not Linux
        _Forks.running = True


def _in_forked_process() -> None:
    _Forks.lost = _Forks.lost or _Forks.running


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_forked_process)
