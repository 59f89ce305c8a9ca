"""Run what may hang on a GPU in a process of its own, and give it up for real.

A process whose kernel waits for a barrier that never comes cannot always be killed: the driver lets
it end when the kernel does. So it is told to end and nobody waits for it, nor for its pipes: what
it writes goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

_given_up: list[subprocess.Popen[bytes]] = []  # never waited for


@dataclass(frozen=True)
class Ended:
    """status: what the process exited with, None if it was given up. text: what it wrote."""

    status: int | None
    text: str


def run_apart(command: Sequence[str], limit: float, given: str = "") -> Ended:
    """Run a command, for at most `limit` seconds whatever it does about its end. given: its
    standard input."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as source:
        source.write(given.encode())
        source.seek(0)
        # a session of its own: compilers and what else it started end with it
        process = subprocess.Popen(
            command, stdin=source, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status = None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            _given_up.append(process)
        finally:
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        return Ended(status, out.read().decode(errors="replace"))
