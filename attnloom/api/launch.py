"""A planned call without its differentiable tensors: what autograd and the operators pass around.

It must hold none of query, key, value and captured tensors: those go through autograd's saved
tensors, where checkpointing, offloading hooks and version checks see them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from attnloom.api import validate
from attnloom.backends.registry import (
    Again,
    AttentionCall,
    Backend,
    ForwardResult,
    Gradients,
    NotYet,
)
from attnloom.block_mask import BlockLists
from attnloom.ir.node import BoundProgram
from attnloom.paged.table import PageTable
from attnloom.plan.kernel_plan import KernelPlan
from attnloom.plan.problem import KernelOptions, compute_type

_MOST_BACKWARDS = 8  # of one launch

Numbers = tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One planned call; `forward` and `backward` run it on tensors.

    score_numbers, mask_numbers: values of the programs' numbers.
    num_score_tensors: how many of the `tensors` of a run belong to the score program; the rest
        are the mask program's.
    table: of sequences in a cache; such a launch has a forward only.
    again: of a launch that runs again on tensors of one form only (`repeats.py`).
    """

    plan: KernelPlan
    backend: Backend
    blocks: BlockLists | None
    scale: float
    score_numbers: Numbers
    mask_numbers: Numbers
    num_score_tensors: int
    table: PageTable | None = None
    again: Again | None = field(default=None, compare=False)

    @property
    def options(self) -> KernelOptions:
        return self.plan.problem.options

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        for_backward: bool = False,
        row_state: torch.Tensor | None = None,
    ) -> AttentionCall:
        """The call as a backend takes it; tensors: captured ones, the score program's first."""
        plan = self.plan
        score = mask = None
        count = self.num_score_tensors
        if plan.score is not None:
            score = BoundProgram(plan.score, tensors[:count], self.score_numbers)
        if plan.mask is not None:
            mask = BoundProgram(plan.mask, tensors[count:], self.mask_numbers)
        return AttentionCall(
            query, key, value, score, mask, self.blocks, self.scale, plan.problem.options,
            self.table, for_backward, row_state,
        )  # fmt: skip

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        want_max_scores: bool,
        for_backward: bool = False,
    ) -> ForwardResult:
        """Run the forward; a problem without queries or keys never reaches the backend."""
        again = self.again
        if again is None:  # one that runs again has no tensor of a negative bit
            query, key, value, *rest = as_they_lie(query, key, value, *tensors)
            tensors = tuple(rest)
        else:
            run = again.forwards.get((want_max_scores, for_backward))
            result = None if run is None else run(query, key, value, tensors)
            if result is not None:
                return result
        named = zip(("query", "key", "value"), (query, key, value), strict=True)
        for name, tensor in (*named, *(("a captured tensor", t) for t in tensors)):
            validate.check_memory(name, tensor)
        if query.numel() == 0 or key.numel() == 0:
            return _empty_forward(query, key, value, want_max_scores)
        call = self.call(query, key, value, tensors, for_backward)
        result = self.backend.forward(call, want_max_scores)
        place = want_max_scores, for_backward
        if again is not None and place not in again.forwards and may_keep(query):
            found = self.backend.forward_again(call, want_max_scores)
            if not isinstance(found, NotYet):
                again.forwards[place] = found
        return result

    def backward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        saved: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """Run the backward; saved: out and lse of the forward, and its row_state if at hand."""
        again = self.again
        place: tuple[object, ...] = ()
        query, key, value, dout, *rest = as_they_lie(query, key, value, dout, *tensors)
        tensors = tuple(rest)
        if dlse is not None:
            (dlse,) = as_they_lie(dlse)
        row_state = saved[2] if saved[2:] else None
        inputs = (query, key, value, *saved[:2], dout, *(() if dlse is None else (dlse,)))
        if again is not None:
            strides = [t.stride() for t in (*inputs, *tensors)]
            place = (dout.dtype, row_state is None, *strides)
            run = again.backwards.get(place)
            grads = None if run is None else run(inputs, tensors, row_state)
            if grads is not None:
                return grads
        if query.numel() == 0 or key.numel() == 0:
            dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
            slots = self.grad_slots()
            captured = tuple(
                torch.zeros_like(t) if i in slots else None
                for i, t in enumerate(tensors[: self.num_score_tensors])
            )
            return Gradients(dq, dk, dv, captured)
        assert key.dtype.itemsize > 1 and value.dtype.itemsize > 1, "converted before: quantized.py"
        out, lse, *_ = saved
        call = self.call(query, key, value, tensors, row_state=row_state)
        grads = self.backend.backward(call, out, lse, dout, dlse)
        if again is not None and place not in again.backwards and may_keep(query):
            if len(again.backwards) >= _MOST_BACKWARDS:
                again.backwards.clear()
            found = self.backend.backward_again(call, out, lse, dout, dlse)
            again.backwards[place] = found
        return grads

    def grad_slots(self) -> tuple[int, ...]:
        """Slots of the captured tensors that the backend returns a gradient for."""
        if self.plan.score is None:
            return ()
        return tuple(i for i, t in enumerate(self.plan.score.tensors) if t.requires_grad)


def as_they_lie(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors whose memory holds their values, as kernels read it: for `z.conj().imag` torch turns
    no sign in memory, it notes a negative bit on the view; zeros of autograd's have no memory."""
    for tensor in tensors:
        if tensor.is_neg() or tensor._is_zerotensor():
            return tuple(_in_memory(t) for t in tensors)
    return tensors


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def may_keep(query: torch.Tensor) -> bool:
    """Whether what is derived now may serve later calls: the memory of a CUDA graph that is being
    captured holds nothing before its first replay."""
    return not (query.is_cuda and torch.cuda.is_current_stream_capturing())


def _empty_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, want_max_scores: bool
) -> ForwardResult:
    real = compute_type(query.dtype, key.dtype, value.dtype).torch
    rows = query.shape[:3]
    out = query.new_zeros(*rows, value.size(3))
    lse = query.new_full(rows, -math.inf, dtype=real)
    return ForwardResult(out, lse, lse.clone() if want_max_scores else None)


def flat_gradients(launch: Launch, grads: Gradients) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and one gradient for each slot of launch.grad_slots()."""
    captured = []
    for slot in launch.grad_slots():
        grad = grads.dtensors[slot]
        assert grad is not None, "a backend left out the gradient of a captured tensor"
        captured.append(grad)
    return (grads.dq, grads.dk, grads.dv, *captured)
