"""Service: an engine in a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from attnloom.errors import AttnloomError, OverloadedError, counted
from attnloom.serving.engine import Engine
from attnloom.serving.request import Output, Request

LAST_STEP_S = 5  # for a step of the model that still runs when all else has ended

_log = logging.getLogger("attnloom.serving")


class StepFailedError(AttnloomError, RuntimeError):
    """A step of the model raised an error, and the requests in the engine are lost; or it gave a
    request nothing to draw from, or the tokenizer raised one for it, and that one is."""


class StoppedError(StepFailedError):
    """The service was closed; what had not ended is cut off."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down.")


@dataclass(slots=True, eq=False)
class _Caller:
    """Where the outputs of a request go. Events: None once it is queued, outputs, an exception."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Output | Exception | None] = field(default_factory=asyncio.Queue)

    def send(self, event: Output | Exception | None) -> None:
        """From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Outputs:
    """What the requests of one caller give, as it comes, up to the last of each.

    Attributes:
        names: of the requests.
    """

    def __init__(self, service: Service, names: tuple[str, ...], caller: _Caller) -> None:
        self.names = names
        self._service, self._caller, self._left = service, caller, {*names}
        service._listening.add(caller)

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Output:
        if not self._left:
            raise StopAsyncIteration
        event = await self._caller.events.get()
        if isinstance(event, Exception):
            self.end()
            raise event
        assert event is not None
        if event.finish is not None:
            self._left.discard(event.name)
            if not self._left:
                self.end()
        return event

    async def aclose(self) -> None:
        """Listen no more, which cancels what has not ended."""
        for name in self._left:
            self._service.cancel(name)
        self.end()

    def end(self) -> None:
        """Listen no more to what has ended."""
        self._left.clear()
        self._service._listening.discard(self._caller)


class Service:
    """Takes requests at any time, also while a step runs, and hands out what each step gives.

    Only the thread touches the engine; callers leave it notes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._callers: dict[str, _Caller] = {}  # the thread's own
        self._listening: set[_Caller] = set()  # those whose Outputs have not ended
        self._arrivals: deque[tuple[tuple[Request, ...], _Caller]] = deque()
        self._num_arriving = 0  # requests in them
        self._departures: deque[str] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="attnloom-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return self._num_arriving + len(self.engine.scheduler.waiting)

    @property
    def num_listening(self) -> int:
        """Callers whose requests have not all ended."""
        return len(self._listening)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive() and not self._closed

    async def submit(self, *requests: Request) -> Outputs:
        """Queue requests, all or none; what they give.

        Raises:
            RequestError: one can never be served.
            OverloadedError: too many are waiting.
            StoppedError: the service is closed.
        """
        for request in requests:
            self.engine.check(request)
        caller = _Caller(asyncio.get_running_loop())
        with self._wake:
            # The engine counts again; this keeps the notes bounded while a long step runs.
            room = self.engine.limits.max_waiting - self.num_waiting
            if self._closed:
                raise StoppedError
            if len(requests) > room:
                self.engine.metrics.refused += 1
                raise OverloadedError(self._full(len(requests)))
            self._num_arriving += len(requests)
            self._arrivals.append((requests, caller))
            self._wake.notify()
            # Under the lock, so that `cut_off` finds the caller.
            outputs = Outputs(self, tuple(request.name for request in requests), caller)
        try:
            accepted = await caller.events.get()
        except asyncio.CancelledError:
            await outputs.aclose()
            raise
        if isinstance(accepted, Exception):
            outputs.end()
            raise accepted
        return outputs

    def _full(self, count: int) -> str:
        waiting = counted(self.num_waiting, "request", "are")
        if count == 1:
            return f"{waiting} waiting, the most allowed; try again later."
        most = self.engine.limits.max_waiting
        return (
            f"{waiting} waiting, and {count} more at once do not fit into the {most} allowed; try "
            "again later."
        )

    def cancel(self, name: str) -> None:
        """Forget a request before the next step."""
        with self._wake:
            self._departures.append(name)
            self._wake.notify()

    def cut_off(self) -> None:
        """Take no more requests and end those in progress with a StoppedError, at once."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        for caller in list(self._listening):  # a step may take long, and they need not wait for it
            caller.send(StoppedError())

    def close(self, seconds: float | None = None) -> bool:
        """Cut off, and wait for the thread, which ends after its present step.

        Args:
            seconds: how long; None: until it ended.
        Returns:
            whether it has ended.
        """
        self.cut_off()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._arrivals or self._departures or self.engine.busy):
                    self._wake.wait()
                if self._closed:
                    break
            self._read_notes()
            try:
                outputs = self.engine.step()
            except Exception as error:
                _log.exception("a step failed; its requests are given up")
                self.engine.metrics.failed_steps += 1
                self._fail_all(StepFailedError(f"the model failed: {type(error).__name__}."))
                continue
            for output in outputs:
                self._hand_out(output)
        self._fail_all(StoppedError())
        while self._arrivals:
            self._arrivals.popleft()[1].send(StoppedError())

    def _hand_out(self, output: Output) -> None:
        caller = self._callers.get(output.name)
        if caller is None:
            return
        if output.error is not None:
            # whoever asked for several texts at once gets one answer, which is an error now
            self._fail(caller, _given_up(output.error))
            return
        caller.send(output)
        if output.finish is not None:
            del self._callers[output.name]

    def _fail(self, caller: _Caller, error: Exception) -> None:
        """Give up what a caller has in the engine."""
        for name in [name for name, held in self._callers.items() if held is caller]:
            self._depart(name)
        caller.send(error)

    def _read_notes(self) -> None:
        # Arrivals first: a request may leave before it was ever read.
        self._each(self._arrivals, self._arrive)
        self._each(self._departures, self._depart)

    def _each(self, notes: deque, act: Callable) -> None:
        while notes:
            act(notes.popleft())

    def _arrive(self, note: tuple[tuple[Request, ...], _Caller]) -> None:
        requests, caller = note
        with self._wake:
            self._num_arriving -= len(requests)
        added: list[str] = []
        try:
            for request in requests:
                added.append(self.engine.add(request))
        except AttnloomError as error:
            for name in added:
                self.engine.cancel(name)
            self.engine.metrics.refused += isinstance(error, OverloadedError)
            caller.send(error)
            return
        self._callers.update(dict.fromkeys(added, caller))
        caller.send(None)

    def _depart(self, name: str) -> None:
        self._callers.pop(name, None)
        self.engine.cancel(name)

    def _fail_all(self, error: Exception) -> None:
        for caller in {*self._callers.values()}:
            self._fail(caller, error)


def _given_up(error: Exception) -> StepFailedError:
    """What the caller of a request is told; the log says more of an error that is not ours."""
    if isinstance(error, AttnloomError):
        _log.error("a request is given up: %s", error)
        return StepFailedError(str(error))
    _log.error("a request is given up: the tokenizer failed", exc_info=error)
    return StepFailedError(f"the tokenizer failed: {type(error).__name__}.")
