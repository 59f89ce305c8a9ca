"""The Gluon backend: warp-specialised kernels for Hopper GPUs.

A call whose kind these kernels take may still be one that they do not: strides that TMA cannot
read, or few queries against many keys, for which the Triton backend splits the keys. Under "auto"
the Triton backend then runs that call; a backend chosen by name refuses it.
"""

from __future__ import annotations

import functools
import importlib
import logging

import torch

from attnloom.backends.collecting import uncollected
from attnloom.backends.gluon import gate
from attnloom.backends.registry import (
    AttentionCall,
    BackwardAgain,
    ForwardAgain,
    ForwardResult,
    Gradients,
    NotYet,
    load,
)
from attnloom.backends.triton.current import on_device
from attnloom.errors import UnsupportedError

_log = logging.getLogger("attnloom")
_said: set[str] = set()


class GluonBackend:
    """Fused attention in Gluon kernels; see `registry.Backend`."""

    name = "gluon"

    def unsupported(self, call: AttentionCall) -> str | None:
        why = gate.refusal(call)
        if why is None:
            _import_kernels()
        return why

    def forward(self, call: AttentionCall, want_max_scores: bool) -> ForwardResult:
        from attnloom.backends.gluon import launch_forward

        with on_device(call.query.device):
            found = launch_forward.forward(call, want_max_scores)
        if isinstance(found, str):
            return self._other(call, found).forward(call, want_max_scores)
        return found

    def forward_again(
        self, call: AttentionCall, want_max_scores: bool
    ) -> ForwardAgain | NotYet | None:
        from attnloom.backends.gluon import launch_forward

        with on_device(call.query.device):
            found = launch_forward.forward_again(call, want_max_scores)
        if isinstance(found, str):
            return self._other(call, found).forward_again(call, want_max_scores)
        return found

    def backward(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        from attnloom.backends.gluon import launch_backward

        why = gate.call_refusal(call) or launch_backward.refusal(call)
        if why is not None:
            return self._other(call, why).backward(call, out, lse, dout, dlse)
        with on_device(call.query.device):
            return launch_backward.backward(call, out, lse, dout, dlse)

    def backward_again(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> BackwardAgain | None:
        from attnloom.backends.gluon import launch_backward

        why = gate.call_refusal(call) or launch_backward.refusal(call)
        if why is not None:
            return self._other(call, why).backward_again(call, out, lse, dout, dlse)
        with on_device(call.query.device):
            found = launch_backward.backward_again(call, out, lse, dout, dlse)
        if isinstance(found, str):
            return load("triton").backward_again(call, out, lse, dout, dlse)
        return found

    def _other(self, call: AttentionCall, why: str):
        """The Triton backend; an error if this one was asked for."""
        if call.options.backend != "auto":
            raise UnsupportedError(
                f"backend 'gluon' cannot run this: {why} Use backend='auto' to let attnloom choose."
            )
        if why not in _said:
            _said.add(why)
            _log.info("backend 'gluon' cannot run this: %s The next backend runs it.", why)
        return load("triton")


@functools.cache
def _import_kernels() -> None:
    with uncollected():
        importlib.import_module("attnloom.backends.gluon.launch_forward")
