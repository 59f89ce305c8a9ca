"""Kernels that are compiled in threads, beside each other and beside what the host does meanwhile.

Only Triton's front end, which reads a kernel's source, holds Python's lock: 0.2 of 1.7 s of a
Hopper forward. Passes, LLVM and the assembler, a process of its own, run beside others of their
kind (Triton's own `AsyncCompileMode` relies on that). A thread compiles and does no more: it asks
the driver for nothing but the current device, touches no stream and no memory, so that it may run
while somebody captures a graph. What it compiled is found by the launch that needs it, in the cache
of the jit function.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from attnloom.backends.triton.current import on_device
from attnloom.backends.triton.launcher import Launcher

_log = logging.getLogger("attnloom")
_thread = threading.local()
_jobs: list[Job] = []
_met: set[tuple[object, ...]] = set()
_lock = threading.Lock()  # of both
_MOST_MET = 4096
_PAUSE = 0.05  # seconds

Launch = tuple[Launcher, tuple[object, ...]]  # and its arguments
Then = Callable[[Any], None]


class _NotThereError(Exception):
    """A kernel would have to be compiled."""


class Job:
    """Launches whose kernels are compiled, one after the other, in a thread of their own.

    then: is given the last kernel, in that thread. read: set once the first kernel's source was
    read, or will not be. made: the last kernel; done when `read` is set if all were on disk. look:
    kernels are taken from the cache on disk alone; `missed` says that one is not there, and
    `otherwise` is compiled in their place. after: so many seconds, or when the process ends.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        then: Then | None = None,
        look: bool = False,
        otherwise: Launch | None = None,
        after: float = 0.0,
    ) -> None:
        self.read = threading.Event()
        self.made: Future[Any] = Future()
        self.missed = False
        self._look, self._otherwise, self._after = look, otherwise, after
        self._process = os.getpid()
        self._device = _current_device()
        # a process that ends waits for Triton to return; threads of torch's autograd would have
        # those that they start be daemons
        self._thread = threading.Thread(target=self._run, args=(launches, then), daemon=False)
        self._thread.start()

    def _run(self, launches: Sequence[Launch], then: Then | None) -> None:
        _thread.read, _thread.look = self.read, self._look
        start = time.monotonic()
        while time.monotonic() < start + self._after and threading.main_thread().is_alive():
            time.sleep(_PAUSE)
        try:
            with on_device(self._device):
                made = self._compile(launches)
            if then is not None:
                then(made)
            self.made.set_result(made)
        except Exception as error:
            # the launch compiles once more, and raises where its caller sees it
            _log.debug("a kernel could not be compiled ahead: %s", error)
            # what a traceback holds, the caller's tensors among it, would live as long as the job
            self.made.set_exception(error.with_traceback(None))
        finally:
            self.read.set()

    def _compile(self, launches: Sequence[Launch]) -> Any:
        """The last kernel, or None where it is not on disk and nothing stands in for it."""
        made = None
        try:
            for launch, args in launches:
                tell_when_read(launch.kernel)
                made = launch.compile(args)
        except _NotThereError:
            self.missed, _thread.look, made = True, False, None
            if self._otherwise is not None:
                (launch, args), self._otherwise = self._otherwise, None
                made = launch.compile(args)
        return made

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Until its kernels are compiled; in a forked process, where no thread is, not at all."""
        if self._process == os.getpid():
            self._thread.join()


def may_begin_quickly() -> bool:
    """Whether first calls may run otherwise than later ones while kernels are compiled. Whoever
    would rather wait for those, a benchmark say, sets ATTNLOOM_QUICK_START=0."""
    return os.environ.get("ATTNLOOM_QUICK_START") != "0"


def compile_for_later(*launches: Launch) -> Job:
    """Compile in a thread, for the current device and for whoever calls `wait_for_all`."""
    job = Job(launches)
    with _lock:
        _jobs[:] = [job for job in _jobs if job.is_running()]
        _jobs.append(job)
    return job


def is_new(*variant: object) -> bool:
    """Whether this is asked for the first time. Making up launches to compile takes milliseconds,
    which a call of another length, say, would pay for kernels that are there."""
    with _lock:
        if variant in _met:
            return False
        if len(_met) >= _MOST_MET:
            _met.clear()
        _met.add(variant)
        return True


def wait_for_all() -> None:
    """Until all kernels are there that `compile_for_later` was asked for."""
    for job in iter(_next, None):
        job.wait()


def _current_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")  # kernels are compiled for a device that is not there
    return torch.device("cuda", torch.cuda.current_device())


def _next() -> Job | None:
    """A job that nobody waits for yet: others wait for those that they took."""
    try:
        return _jobs.pop()
    except IndexError:
        return None


def tell_when_read(kernel: Any) -> None:
    """Have threads of this module hear when Triton has read the source of a kernel."""
    made = kernel.device_caches
    if getattr(made.default_factory, "func", None) is not _bind:
        made.default_factory = functools.partial(_bind, kernel)
        if hasattr(kernel, "ASTSource"):
            kernel.ASTSource = _telling(kernel.ASTSource)


def _bind(kernel: Any) -> Any:
    """What a jit function does when it is first compiled for a device."""
    found = kernel.create_binder()
    kernel.ASTSource = _telling(kernel.ASTSource)
    return found


@functools.cache
def _telling(source: type) -> type:
    """A kind of source that says when it was read."""

    class Telling(source):  # type: ignore[misc, valid-type]
        def make_ir(self, *args: Any, **kwargs: Any) -> Any:
            if getattr(_thread, "look", False):
                raise _NotThereError
            try:
                return super().make_ir(*args, **kwargs)
            finally:
                read = getattr(_thread, "read", None)
                if read is not None:
                    read.set()

    return Telling
