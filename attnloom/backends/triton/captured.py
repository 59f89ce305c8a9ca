"""Memory for the gradients of captured tensors, and what is read from it in the end.

Each contribution (ir/passes/gradient.py) goes to the buffer of its tensor in one of three ways:

    store   the tensor's index is (b, h, q, kv), each once: every score has an element of its own
    add     floating atomics into float32 (float64 in float64 problems)
    fixed   deterministic: 64-bit integers, whose sum does not depend on order. Their scale is a
            power of two that uses the 61 bits that remain when as many contributions as there are
            scores, each as large as the largest that the row kernel met, are added to one element.
            float64 takes a second integer for what the first leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.emit_grad import Sinks, gradient_of, positions_of
from attnloom.ir.passes.gradient import Contribution, Gradient
from attnloom.plan.problem import compute_type

_BITS = 61
_STEP_BITS = 8  # steps of a fused reduction: at most 256
_LARGEST_EXPONENT = 1000.0


@dataclass(frozen=True, slots=True)
class Captured:
    """Buffers of one backward. peaks: [row programs, contributions], filled before `arguments`."""

    call: AttentionCall
    items: tuple[Contribution, ...]
    form: Sinks
    buffers: dict[int, torch.Tensor]

    @staticmethod
    def of(call: AttentionCall) -> Captured | None:
        """Buffers of zeros; None if no captured tensor has a gradient."""
        if call.score is None:
            return None
        found = gradient_of(call.score.program, call.options.exact_math)
        if not found.contributions:
            return None
        items, tensors = found.contributions, call.score.tensors
        form = sinks_form(call, found)
        real = compute_type(call.query.dtype, call.key.dtype, call.value.dtype).torch
        buffers: dict[int, torch.Tensor] = {}
        for item, stored in zip(items, form.stores, strict=True):
            tensor = tensors[item.slot]
            if item.slot in buffers:
                continue
            shape, dtype = tuple(max(n, 1) for n in tensor.shape), real
            if stored:
                dtype = tensor.dtype
            elif form.limbs:
                shape, dtype = (*shape, form.limbs), torch.int64
            fresh = torch.empty if stored and _writes_all(call, tensor) else torch.zeros
            buffers[item.slot] = fresh(shape, dtype=dtype, device=tensor.device)
        return Captured(call, items, form, buffers)

    @property
    def needs_peaks(self) -> bool:
        return bool(self.form.limbs) and not all(self.form.stores)

    def clear(self) -> None:
        """Zeros where the key kernel adds; the row kernel's stores stay."""
        for item, stored in zip(self.items, self.form.stores, strict=True):
            if not stored:
                self.buffers[item.slot].zero_()

    def arguments(self, scales: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """`sinks` of the key kernel's fragments; without scales, of the row kernel's but for the
        first."""
        pointers = tuple(self.buffers[item.slot] for item in self.items)
        return pointers if scales is None else (*pointers, scales)

    def scales(self, peaks: torch.Tensor) -> torch.Tensor:
        """[contributions, 2] float64: of the first integer, and of what it leaves. NaN where a
        contribution is not finite, so that the gradient is NaN."""
        largest = peaks.double().amax(0)
        pairs: list[torch.Tensor] = []
        for item in self.items:
            same = [largest[i] for i, other in enumerate(self.items) if other.slot == item.slot]
            room = self._room(item)
            found = torch.floor(room - torch.log2(torch.stack(same).amax()))
            scale = torch.exp2(found.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))
            scale = torch.where(found > -math.inf, scale, math.nan)
            # no tensor is made of Python numbers: CUDA graphs cannot hold the copy
            pairs += (scale, torch.full_like(scale, 2.0**room))
        return torch.stack(pairs).view(-1, 2)

    def _room(self, item: Contribution) -> int:
        query, key = self.call.query, self.call.key
        scores = query.size(0) * query.size(1) * query.size(2) * key.size(2)
        sharing = sum(other.slot == item.slot for other in self.items)
        steps = _STEP_BITS if any(i.axes for i in self.items if i.slot == item.slot) else 0
        return _BITS - math.ceil(math.log2(scores * sharing)) - steps

    def total(self, scales: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of call.score.tensors in their shapes and dtypes; None where none is wanted."""
        assert self.call.score is not None
        found: list[torch.Tensor | None] = []
        specs = self.call.score.program.tensors
        for slot, (spec, tensor) in enumerate(zip(specs, self.call.score.tensors, strict=True)):
            if not spec.requires_grad:
                found.append(None)
                continue
            buffer = self.buffers.get(slot)
            if buffer is None or not tensor.numel():
                found.append(torch.zeros_like(tensor, memory_format=torch.contiguous_format))
                continue
            if buffer.dtype == torch.int64 and scales is not None:
                buffer = self._rescaled(slot, buffer, scales)
            found.append(buffer.to(tensor.dtype))
        return tuple(found)

    def _rescaled(self, slot: int, buffer: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        number = next(i for i, item in enumerate(self.items) if item.slot == slot)
        scale, rest = scales[number]
        total = buffer[..., 0].double()
        if self.form.limbs == 2:
            total = total + buffer[..., 1].double() / rest
        return total / scale


def sinks_form(call: AttentionCall, found: Gradient) -> Sinks:
    """How each contribution leaves, for the sizes of this call."""
    assert call.score is not None
    slots = [item.slot for item in found.contributions]
    stores = tuple(
        slots.count(item.slot) == 1
        and not item.axes
        and _is_own(call, positions_of(found.program, item), call.score.tensors[item.slot])
        for item in found.contributions
    )
    real = compute_type(call.query.dtype, call.key.dtype, call.value.dtype).torch
    limbs = 2 if real == torch.float64 else 1
    return Sinks(stores, limbs if call.options.deterministic else 0)


def _writes_all(call: AttentionCall, tensor: torch.Tensor) -> bool:
    """Whether stores reach every element of a tensor that scores have to themselves: no tile is
    skipped and no element lies beyond the lengths."""
    query, key = call.query, call.key
    scores = query.size(0) * query.size(1) * query.size(2) * key.size(2)
    return call.blocks is None and tensor.numel() == scores


def _is_own(call: AttentionCall, names: tuple[str | None, ...], tensor: torch.Tensor) -> bool:
    """Whether no two scores share an element, and no index leaves the tensor."""
    query, key = call.query, call.key
    lengths = dict(zip(("b", "h", "q", "kv"), (*query.shape[:3], key.size(2)), strict=True))
    if None in names or len(set(names)) != len(names):
        return False
    needed = {"q", "kv"} | {name for name, length in lengths.items() if length > 1}
    inside = all(size >= lengths[str(name)] for name, size in zip(names, tensor.shape, strict=True))
    return inside and needed <= set(names) and tensor.numel() < 2**31
