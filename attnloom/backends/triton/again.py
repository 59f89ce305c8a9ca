"""Calls that differ from an earlier one in addresses and contents alone: allocate, and start."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from attnloom.backends.registry import AttentionCall, ForwardResult, Gradients
from attnloom.backends.triton import layouts
from attnloom.backends.triton.fields import Tensors
from attnloom.backends.triton.launcher import is_watched, stream_of
from attnloom.backends.triton.lists import is_capturing
from attnloom.backends.triton.operands import Operands
from attnloom.ir.node import BoundProgram

_ALIGNMENT = 16
# A stream, and the addresses of query, key, value, captured tensors, out, lse and max_scores.
Starter = Callable[[int, tuple[int, ...]], None]
# Captured tensors: place, object and version.
_Known = tuple[tuple[int, weakref.ref[torch.Tensor], int], ...]


class ForwardAgain:
    """See `registry.ForwardAgain`: allocates results, looks at addresses, starts."""

    __slots__ = (
        "_device", "_narrow", "_of_mask", "_out", "_rows", "_start", "_unread", "_want_max",
    )  # fmt: skip

    def __init__(self, call: AttentionCall, tensors: Tensors, start: Starter) -> None:
        self._start = start
        self._device = call.query.device.index or 0
        self._out, self._rows = _blank(tensors.out), _blank(tensors.lse)
        self._want_max = tensors.max_scores is not None
        self._narrow = _narrow(call)
        self._of_mask: _Known = ()
        self._unread = unread_rows(tensors.lse)

    def only_for(self, call: AttentionCall) -> ForwardAgain | None:
        """See `BackwardAgain`."""
        found = _of_mask(call)
        if found is None:
            return None
        self._of_mask = found
        return self

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> ForwardResult | None:
        addresses = self._addresses(query, key, value, tensors)
        if addresses is None:
            return None
        out, lse = torch.empty_like(self._out), torch.empty_like(self._rows)
        max_scores = torch.empty_like(self._rows) if self._want_max else None
        unused = lse if max_scores is None else max_scores
        results = (out.data_ptr(), lse.data_ptr(), unused.data_ptr())
        self._start(stream_of(self._device), addresses + results)
        return ForwardResult(out, lse, max_scores)

    def out(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor | None:
        """See `registry.ForwardAgain`. Nobody reads lse, which needs no memory of its own."""
        unread = self._unread
        if unread is None or self._want_max:
            result = self(query, key, value, tensors)
            return None if result is None else result.out
        addresses = self._addresses(query, key, value, tensors)
        if addresses is None:
            return None
        out = torch.empty_like(self._out)
        self._start(stream_of(self._device), (*addresses, out.data_ptr(), unread, unread))
        return out

    def _addresses(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> tuple[int, ...] | None:
        """Those of all inputs; None if the launch is not for them."""
        addresses = (query.data_ptr(), key.data_ptr(), value.data_ptr())
        if 0 in addresses:  # memory that was given back, which validation names
            return None
        if tensors:
            addresses = (*addresses, *[t.data_ptr() for t in tensors])
            if self._narrow and not _still(self._narrow, tensors):
                return None
            if self._of_mask and (_differ(self._of_mask, tensors) or is_capturing(query)):
                return None
        return addresses if _as_expected(addresses, self._device) else None


class BackwardAgain:
    """See `registry.BackwardAgain`."""

    __slots__ = ("_blanks", "_device", "_narrow", "_no_captured", "_of_mask", "_starts")

    def __init__(
        self, operands: Operands, buffers: Sequence[torch.Tensor], starts: Sequence[Starter]
    ) -> None:
        call = operands.call
        self._starts = tuple(starts)
        self._device = call.query.device.index or 0
        results = (operands.dq, operands.dk, operands.dv)
        self._blanks = tuple(_blank(t) for t in (*results, *buffers))
        self._narrow = _narrow(call)
        self._of_mask: _Known = ()
        self._no_captured = () if call.score is None else (None,) * len(call.score.tensors)

    @staticmethod
    def of(
        operands: Operands, buffers: Sequence[torch.Tensor], starts: Sequence[Starter | None]
    ) -> BackwardAgain | None:
        """Args:
        buffers: memory beside the results, allocated at each call.
        starts: kernels in their order; addresses are those of `operands_of_aliases`, then of the
            buffers. None where one cannot be started so.
        """
        found = [start for start in starts if start is not None]
        return BackwardAgain(operands, buffers, found) if len(found) == len(starts) else None

    def only_for(self, call: AttentionCall) -> BackwardAgain | None:
        """The same, for the tensors of this call's mask, as long as they hold what they hold; not
        while a graph is recorded, which asks nobody at replay."""
        found = _of_mask(call)
        if found is None:
            return None
        self._of_mask = found
        return self

    def __call__(
        self,
        inputs: tuple[torch.Tensor, ...],
        tensors: tuple[torch.Tensor, ...],
        row_state: torch.Tensor | None = None,
    ) -> Gradients | None:
        addresses = [t.data_ptr() for t in (*inputs, *tensors)]
        device = self._device
        if not _as_expected(addresses, device):
            return None
        if self._narrow and not _still(self._narrow, tensors):
            return None
        if self._of_mask and (_differ(self._of_mask, tensors) or is_capturing(inputs[0])):
            return None
        fresh = [torch.empty_like(blank) for blank in self._blanks]
        places = (*addresses, *[t.data_ptr() for t in fresh])
        stream = stream_of(device)
        for start in self._starts:
            start(stream, places)
        dq, dk, dv = fresh[:3]
        return Gradients(dq, dk, dv, self._no_captured)


def _as_expected(addresses: Sequence[int], device: int) -> bool:
    """Whether kernels may be started: addresses are where nearly all are, the device is the current
    one, and nobody wants to hear of launches."""
    bits = 0
    for address in addresses:
        bits |= address
    return not (bits % _ALIGNMENT or torch._C._cuda_getDevice() != device or is_watched())


_UNREAD_BYTES = 2**20
_unread: dict[torch.device, torch.Tensor] = {}


def unread_rows(lse: torch.Tensor) -> int | None:
    """Address of memory for as many rows of statistics that nobody reads, all launches of a device
    alike: it is never given back, as a launch of any stream or graph may write there. None for
    more rows than it has, and while a graph is recorded, whose memory goes with the graph."""
    if lse.numel() * lse.element_size() > _UNREAD_BYTES or is_capturing(lse):
        return None
    memory = _unread.get(lse.device)
    if memory is None:
        fresh = torch.empty(_UNREAD_BYTES, dtype=torch.uint8, device=lse.device)
        memory = _unread.setdefault(lse.device, fresh)
    return memory.data_ptr()


def _of_mask(call: AttentionCall) -> _Known | None:
    """Where its tensors are among the captured ones; None if writes to one are not counted."""
    assert call.mask is not None
    tensors = call.mask.tensors
    if any(t.is_inference() for t in tensors):
        return None
    first = 0 if call.score is None else len(call.score.tensors)
    return tuple((first + i, weakref.ref(t), t._version) for i, t in enumerate(tensors))


def _differ(known: _Known, tensors: tuple[torch.Tensor, ...]) -> bool:
    return any(
        ref() is not tensors[place] or tensors[place]._version != version
        for place, ref, version in known
    )


_Narrow = tuple[tuple[int, bool], ...]


def _narrow(call: AttentionCall) -> _Narrow:
    """Of captured 64-bit integers a kernel may know that they are small: layouts.py looks at each
    version of them."""
    return tuple(
        (place, layouts.is_narrow_now(tensor))
        for place, tensor in enumerate(captured(call))
        if tensor.dtype is torch.int64
    )


def _still(narrow: _Narrow, tensors: tuple[torch.Tensor, ...]) -> bool:
    return all(layouts.is_narrow_now(tensors[place]) is was for place, was in narrow)


def captured(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Captured tensors of score, then of mask."""
    return tuple(t for bound in (call.score, call.mask) if bound is not None for t in bound.tensors)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Of one element, shown in the tensor's shape: `empty_like` makes contiguous tensors of it, in
    half the time of torch.empty."""
    return tensor.new_empty(1).expand(tensor.shape)


def with_aliases(
    call: AttentionCall, tensors: Tensors
) -> tuple[AttentionCall, Tensors, list[torch.Tensor]] | None:
    """The same call with every tensor an object of its own, so that a kernel's arguments tell which
    came from where; and these objects in the order of Starter's addresses. None for inputs that
    kernels are given copies of."""
    given, taken = (call.query, call.key, call.value), tensors.operands[:3]
    if any(a is not b for a, b in zip(given, taken, strict=True)):
        return None
    query, key, value, out, lse = (t.detach() for t in (*given, tensors.out, tensors.lse))
    max_scores = None if tensors.max_scores is None else tensors.max_scores.detach()
    score, mask = _aliases(call.score), _aliases(call.mask)
    call = replace(call, query=query, key=key, value=value, score=score, mask=mask)
    tensors = Tensors(query, key, value, out, lse, max_scores)
    sources = [query, key, value, *captured(call), *tensors.outputs()]
    return call, tensors, sources


def _aliases(bound: BoundProgram | None) -> BoundProgram | None:
    if bound is None:
        return None
    return replace(bound, tensors=tuple(t.detach() for t in bound.tensors))


def operands_of_aliases(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[Operands, tuple[torch.Tensor, ...]] | None:
    """As `with_aliases`, of a backward: its operands, and the objects in the order of
    BackwardAgain's addresses. None for inputs that kernels are given copies of, results that are
    converted, and captured tensors with gradients."""
    if call.learns:
        return None
    query, key, value, out, lse, dout = (
        t.detach() for t in (call.query, call.key, call.value, out, lse, dout)
    )
    dlse = None if dlse is None else dlse.detach()
    score, mask = _aliases(call.score), _aliases(call.mask)
    call = replace(call, query=query, key=key, value=value, score=score, mask=mask)
    found = Operands.of(call, out, lse, dout, dlse)
    given = [query, key, value, out, lse, dout, *([] if dlse is None else [dlse])]
    taken = [*found.inputs[:3], found.out, found.lse, found.dout]
    taken += [] if found.dlse is None else [found.dlse]
    results = (found.dq, found.dk, found.dv)
    if any(a is not b for a, b in zip(given, taken, strict=True)) or any(
        a.dtype != b.dtype for a, b in zip(results, given, strict=False)
    ):
        return None
    return found, (*given, *captured(call), *results)
