"""Exclusive: calls of which one may run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from attnloom.errors import OverlapError


class Exclusive:
    """Refuses a call while another one runs, in any thread, also in the midst of the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = ""

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Run a call of this name.

        Raises:
            OverlapError: another one runs.
        """
        if not self._lock.acquire(blocking=False):
            raise OverlapError(
                f"{name} was called in thread {threading.current_thread().name!r} while "
                f"{self._running} of the same engine runs; an engine takes one step at a time. "
                "Call step, generate and warm_up in one thread, or make an engine for each."
            )
        try:
            self._running = f"{name} (thread {threading.current_thread().name!r})"
            yield
        finally:
            self._lock.release()
