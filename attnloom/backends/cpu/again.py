"""Calls that differ from an earlier one in addresses and contents alone: its arguments again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from attnloom.backends.cpu.captured_gradients import CapturedGradients
from attnloom.backends.cpu.forks import threads_lost
from attnloom.backends.cpu.launch_args import Arguments
from attnloom.backends.registry import AttentionCall, ForwardResult, Gradients

# Runs a kernel on arguments: 0, or that integers did not fit in its lanes.
Run = Callable[[Arguments], int]
_Form = tuple[tuple[int, ...], torch.dtype]


class _Again:
    """Keeps the arguments of a call, and writes a few addresses where an ordinary call packs some
    ninety words. Holds no tensor of the caller's."""

    __slots__ = ("_arguments", "_lock", "_run", "_threads")

    def __init__(self, arguments: Arguments, run: Run) -> None:
        self._arguments: Arguments | None = arguments
        self._run = run
        self._threads = torch.get_num_threads()
        self._lock = threading.Lock()  # the arguments are there once

    def _taken(self) -> bool:
        """Whether nobody else has the arguments, which are this caller's until the lock is
        released, and as many threads are there as they were made for."""
        return (
            torch.get_num_threads() == self._threads
            and not threads_lost()
            and self._lock.acquire(blocking=False)
        )

    def _has_run(self, arguments: Arguments) -> bool:
        """Run the kernel. Captured integers may be too wide by now: the ordinary way has another
        kernel."""
        if self._run(arguments):
            self._arguments = None
            return False
        return True


class ForwardAgain(_Again):
    """See `registry.ForwardAgain`."""

    __slots__ = ("_form", "_has_padding", "_out", "_rows", "_state", "_want_max")

    def __init__(
        self,
        call: AttentionCall,
        arguments: Arguments,
        run: Run,
        result: ForwardResult,
        want_max_scores: bool,
    ) -> None:
        """Args:
        arguments: of the forward of this call. result: like its own.
        """
        super().__init__(arguments, run)
        self._want_max = want_max_scores
        self._out, self._rows = _form_of(result.out), _form_of(result.lse)
        self._state = None if result.row_state is None else _form_of(result.row_state)
        self._form = _forms(call.query, call.key, call.value)
        self._has_padding = call.table is not None and call.table.counts is not None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> ForwardResult | None:
        if _forms(query, key, value) != self._form:
            return None
        if not (query.data_ptr() and key.data_ptr() and value.data_ptr()):
            return None  # memory that was given back, which validation names
        if not self._taken():
            return None
        try:
            arguments = self._arguments
            if arguments is None:
                return None
            out = _blank(self._out, 0.0 if self._has_padding else None)
            least = -math.inf if self._has_padding else None
            lse = _blank(self._rows, least)
            max_scores = _blank(self._rows, least) if self._want_max else None
            state = None if self._state is None else _blank(self._state)
            rows = lse, max_scores, None, state
            arguments.set_addresses((query, key, value, out), rows, tensors)
            if not self._has_run(arguments):
                return None
            return ForwardResult(out, lse, max_scores, state)
        finally:
            self._lock.release()

    def out(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor | None:
        """See `registry.ForwardAgain`."""
        result = self(query, key, value, tensors)
        return None if result is None else result.out


class BackwardAgain(_Again):
    """See `registry.BackwardAgain`."""

    __slots__ = ("_captured", "_results")

    def __init__(
        self,
        arguments: Arguments,
        run: Run,
        results: tuple[torch.Tensor, ...],
        captured: CapturedGradients,
    ) -> None:
        """Args:
        arguments: of a backward, whose table of buffers is that of `captured`. results: dq, dk and
            dv like its own.
        """
        super().__init__(arguments, run)
        self._results = tuple(map(_form_of, results))
        self._captured = captured

    def __call__(
        self,
        inputs: tuple[torch.Tensor, ...],
        tensors: tuple[torch.Tensor, ...],
        row_state: torch.Tensor | None,
    ) -> Gradients | None:
        if not self._taken():
            return None
        try:
            arguments = self._arguments
            if arguments is None:
                return None
            query, key, value, out, lse, dout, *dlse = inputs
            dq, dk, dv = map(_blank, self._results)
            operands = query, key, value, out, dout, dq, dk, dv
            rows = lse, None, dlse[0] if dlse else None, row_state
            arguments.set_addresses(operands, rows, tensors)
            buffers = self._captured.buffers()
            if not self._has_run(arguments):
                return None
            return Gradients(dq, dk, dv, self._captured.total(buffers))
        finally:
            self._lock.release()


def _forms(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[tuple[int, ...], ...]:
    return query.shape, query.stride(), key.shape, key.stride(), value.stride()


def _form_of(tensor: torch.Tensor) -> _Form:
    return tuple(tensor.shape), tensor.dtype


def _blank(form: _Form, filling: float | None = None) -> torch.Tensor:
    shape, dtype = form
    if filling is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.full(shape, filling, dtype=dtype, device="cpu")
