"""A line on the terminal that says what takes so long; nothing where nobody looks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_FIRST_S = 1.0
_EVERY_S = 0.2
_BAR = "|/-\\"


class _Line:
    """The current stage and its seconds, redrawn by a thread until the work is done."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.stage, self.since = "", time.monotonic()
        self.started = self.since
        self.done = threading.Event()
        self.drawn = False

    def begin(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def run(self) -> None:
        tick = 0
        while not self.done.wait(_EVERY_S):
            now = time.monotonic()
            if now - self.started < _FIRST_S:
                continue
            tick += 1
            text = f"{_BAR[tick % len(_BAR)]} {self.stage} ({now - self.since:.0f} s)"
            self.stream.write(f"\r\x1b[2K{text[:100]}")
            self.stream.flush()
            self.drawn = True

    def erase(self) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()


@contextlib.contextmanager
def shown(stream: TextIO | None = None) -> Iterator[_Line]:
    """A line whose `begin` is a tool's `progress`.

    Args:
        stream: default stderr. Nothing is written unless it is a terminal, nor in the first second.
    """
    where = sys.stderr if stream is None else stream
    line = _Line(where)
    if not where.isatty():
        yield line
        return
    thread = threading.Thread(target=line.run, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.done.set()
        thread.join()
        line.erase()
