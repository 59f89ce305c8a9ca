"""The Triton backend: NVIDIA and AMD GPUs, and CPU tensors under Triton's interpreter.

Kernels are imported where a call needs them: modules of those for decoding and pages are a tenth of
what a first call imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnloom.backends.registry import (
    AttentionCall,
    BackwardAgain,
    ForwardAgain,
    ForwardResult,
    Gradients,
)
from attnloom.backends.triton import launch_forward
from attnloom.backends.triton.beside import Launch
from attnloom.backends.triton.configs import MAX_HEAD_DIM
from attnloom.backends.triton.current import on_device
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.launcher import addresses_aligned
from attnloom.backends.triton.lists import fitted
from attnloom.backends.triton.operands import Operands
from attnloom.backends.triton.refined import refined
from attnloom.backends.triton.sizes import is_decode
from attnloom.errors import counted

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STORED = (*_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)  # keys and values without gradients
_POSITIONS = 2**31 - 256  # row and key numbers of the last tile fit int32


class TritonBackend:
    """Fused attention in Triton kernels; see `registry.Backend`."""

    name = "triton"

    def unsupported(self, call: AttentionCall) -> str | None:
        query, key, value = call.query, call.key, call.value
        if query.device.type != ("cpu" if INTERPRETED else "cuda"):
            return (
                f"query is on {query.device}; Triton kernels run on CUDA and ROCm devices, and on "
                "the CPU only when TRITON_INTERPRET=1 was set before the first import."
            )
        if call.table is not None:
            from attnloom.backends.triton import launch_paged

            if (why := launch_paged.unseen(call)) is not None:
                return why
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dtype not in (_DTYPES if name == "query" else _STORED):
                return (
                    f"{name} has dtype {tensor.dtype}; the kernels take halves, float32, float64."
                )
            if not 1 <= tensor.size(3) <= MAX_HEAD_DIM:
                return (
                    f"{name} has head dimension {tensor.size(3)}; the kernels take 1 to "
                    f"{MAX_HEAD_DIM}."
                )
            if tensor.size(2) > _POSITIONS:
                rows = counted(tensor.size(2), "row")
                return f"{name} has {rows} (the kernels take {_POSITIONS})."
        return None

    def forward(self, call: AttentionCall, want_max_scores: bool) -> ForwardResult:
        with on_device(call.query.device):
            if call.table is not None:
                from attnloom.backends.triton import launch_paged

                return launch_paged.attend(call, want_max_scores)
            if is_decode(call):
                from attnloom.backends.triton import launch_decode

                return launch_decode.decode(call, want_max_scores)
            return launch_forward.forward(_fitted(call), want_max_scores)

    def forward_again(self, call: AttentionCall, want_max_scores: bool) -> ForwardAgain | None:
        if call.table is not None or not addresses_aligned(call):
            return None
        with on_device(call.query.device):
            if is_decode(call):
                from attnloom.backends.triton import launch_decode

                return launch_decode.decode_again(call, want_max_scores)
            return launch_forward.forward_again(_fitted(call), want_max_scores)

    def backward(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        from attnloom.backends.triton import launch_backward

        with on_device(call.query.device):
            return launch_backward.backward(refined(_fitted(call)), out, lse, dout, dlse)

    def backward_again(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> BackwardAgain | None:
        from attnloom.backends.triton import launch_backward

        if not addresses_aligned(call):
            return None
        with on_device(call.query.device):
            given = _fitted(call)
            smaller = refined(given)
            found = launch_backward.backward_again(smaller, out, lse, dout, dlse)
        if found is not None and smaller is not given:
            # blocks of 64 follow from what the mask_mod's tensors held
            return found.only_for(call)
        return found


def _fitted(call: AttentionCall) -> AttentionCall:
    """The call with blocks that its lengths have a use for."""
    blocks = call.blocks
    if blocks is None:
        return call
    smaller = fitted(blocks)
    return call if smaller is blocks else replace(call, blocks=smaller)


def backward_launches(
    call: AttentionCall, out: torch.Tensor, lse: torch.Tensor
) -> Sequence[Launch]:
    """What the backward of this forward will launch first, to be compiled and not started."""
    from attnloom.backends.triton import launch_backward

    return launch_backward.first_launches(Operands.expected(refined(_fitted(call)), out, lse))
