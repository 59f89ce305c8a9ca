"""Calls that differ from an earlier one in addresses and contents alone: its arguments again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from attnloom.backends.cpu.forks import threads_lost
from attnloom.backends.cpu.launch_args import Arguments
from attnloom.backends.registry import AttentionCall, ForwardResult

# Runs a kernel on arguments: 0, or that integers did not fit in its lanes.
Run = Callable[[Arguments], int]


class ForwardAgain:
    """See `registry.ForwardAgain`: keeps the arguments of a call, and writes four or five addresses
    where an ordinary call packs some ninety words. Holds no tensor of the caller's."""

    __slots__ = (
        "_arguments", "_form", "_has_padding", "_lock", "_out", "_rows", "_run", "_threads",
        "_want_max",
    )  # fmt: skip

    def __init__(
        self,
        call: AttentionCall,
        arguments: Arguments,
        run: Run,
        lse: torch.Tensor,
        want_max_scores: bool,
    ) -> None:
        """Args:
        arguments: of the forward of this call. lse: one like its own.
        """
        self._arguments: Arguments | None = arguments
        self._run, self._want_max = run, want_max_scores
        batch, heads, q_len, _ = call.query.shape
        self._out = (batch, heads, q_len, call.value.size(3)), call.query.dtype
        self._rows = tuple(lse.shape), lse.dtype
        self._form = _form(call.query, call.key, call.value)
        self._has_padding = call.table is not None and call.table.counts is not None
        self._threads = torch.get_num_threads()
        self._lock = threading.Lock()  # the arguments are there once

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> ForwardResult | None:
        if (
            _form(query, key, value) != self._form
            or torch.get_num_threads() != self._threads
            or threads_lost()
            or not self._lock.acquire(blocking=False)
        ):
            return None
        try:
            arguments = self._arguments
            if arguments is None:
                return None
            out = _blank(self._out, 0.0 if self._has_padding else None)
            least = -math.inf if self._has_padding else None
            lse = _blank(self._rows, least)
            max_scores = _blank(self._rows, least) if self._want_max else None
            arguments.set_addresses(query, key, value, out, lse, max_scores)
            if self._run(arguments):  # too wide by now: the ordinary way has another kernel
                self._arguments = None
                return None
            return ForwardResult(out, lse, max_scores)
        finally:
            self._lock.release()


def _form(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[object, ...]:
    return query.shape, query.stride(), key.shape, key.stride(), value.stride()


def _blank(form: tuple[tuple[int, ...], torch.dtype], filling: float | None) -> torch.Tensor:
    shape, dtype = form
    if filling is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.full(shape, filling, dtype=dtype, device="cpu")
