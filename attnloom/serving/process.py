"""The server's process: from its first connection to the last answer after it was told to stop.

The first SIGTERM or SIGINT (Ctrl-C): no new connections, and answers that were begun may go on for
some seconds. Those that have not ended by then are told so, in their own form: a stream gets an
error and its end, other requests get an answer 503. The second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from attnloom.errors import counted
from attnloom.serving.service import Service

_LAST_WORDS_S = 2  # for the ends of answers that were cut off to reach their readers

_log = logging.getLogger("uvicorn.error")  # whose lines stand beside these


class StoppableServer(uvicorn.Server):
    """Takes signals and ends streams as described above."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            _log.info("listening on %s (Ctrl-C or SIGTERM ends it)", url(listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.ensure_future(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting

    async def _cut(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        left = self._service.num_listening
        if left:
            _log.warning(
                "%s did not end within %g s: cut off", counted(left, "answer"), self._drain_seconds
            )
        self._service.cut_off()


def run(app: FastAPI, listener: socket.socket, drain_seconds: int) -> int:
    """Serve until a signal says not to.

    Returns:
        exit code: 0, also if answers were cut off.
    """
    service: Service = app.state.service
    config = uvicorn.Config(
        app, log_level="info", timeout_graceful_shutdown=drain_seconds + _LAST_WORDS_S
    )
    StoppableServer(config, service, drain_seconds).run(sockets=[listener])
    if not service.close(0):  # the application has waited for it already
        # Threads that are in the midst of a kernel do not survive the interpreter's end.
        _log.warning("a step of the model still runs; it is left")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def url(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
