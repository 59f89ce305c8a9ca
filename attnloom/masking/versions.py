"""Notices that what a mask was made from has changed since.

The lists of a mask are made once; scores of partial tiles ask the mask_mod, which reads its
captured tensors and numbers as they are by then. Once the two differ, whole tiles follow the old
values and single scores the new ones.

- Tensors changed in place: torch counts the changes of every tensor, together with those of its
  views, so that comparing the counts tells.
- Other tensors, other numbers, another branch: what the mask_mod depends on, or else its traced
  program, is compared with that of the build. Tensors are compared by identity, and by value where
  they are others; if all is equal, the others are the ones to look at from then on.

Not noticed: changes that torch does not count (through numpy, `.data` or a kernel of one's own),
changes in place of tensors made under inference_mode, other tensors that cannot be compared
(subclasses, under dispatch modes, mapped by torch.vmap, while a CUDA graph is captured), and what
happened before a mask came through a pytree.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom.errors import ModError
from attnloom.ir.node import BoundProgram
from attnloom.masking import transforms
from attnloom.masking.captures import captured_tensors, map_captures
from attnloom.trace.dependencies import Dependencies, dependencies
from attnloom.trace.names import mod_name, name_of, number_name
from attnloom.trace.tracer import trace_mask

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Reading:
    """What lists were made from.

    mod: the mask_mod of the mask. A mask that was given another one since is its user's affair.
    source: the mask_mod that the lists were made by, which `mod` asks for a part of a mask.
    tensors, counts: what it captures, and how often each had been changed.
    found: what it depended on, if that can be told; bound: its trace. None: not looked at yet.
    """

    mod: Any
    source: Any
    tensors: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]
    found: Dependencies | None
    bound: BoundProgram | None


def read(mod: Any, bound: BoundProgram | None = None) -> Reading:
    """The state of a mask_mod now.

    bound: its trace. None: it is taken when the mask is first used, for mods that nobody else can
        reach before.
    """
    return _read(mod, mod, bound)


def _read(mod: Any, source: Any, bound: BoundProgram | None) -> Reading:
    found = dependencies(source)
    if found is not None:
        captured = found.tensors
    else:
        captured = [*captured_tensors(source), *(() if bound is None else bound.tensors)]
    tensors = tuple({id(t): t for t in captured if not t.is_inference()}.values())
    return Reading(mod, source, tensors, tuple([t._version for t in tensors]), found, bound)


def moved(mask: Any, to: Callable[[Any], Any]) -> tuple[Any, Reading | None]:
    """The mask_mod of a mask with captured tensors where `to` takes them, and its state there."""
    reading = mask._reading
    if reading is None or reading.mod is not mask.mask_mod:
        return map_captures(mask.mask_mod, torch.Tensor, to, with_globals=True), None
    bound = reading.bound
    held = () if bound is None else bound.tensors
    # together, so that what they share is moved once
    all_of_it = (mask.mask_mod, reading.source, held)
    mod, source, held = map_captures(all_of_it, torch.Tensor, to, with_globals=True)
    return mod, _read(mod, source, None if bound is None else replace(bound, tensors=held))


def handed_on(mask: Any, mod: Any) -> Reading | None:
    """The same state, for a mask with another mod that was made from this one's lists."""
    reading = mask._reading
    if reading is None or reading.mod is not mask.mask_mod:
        return None
    return replace(reading, mod=mod)


def check(mask: Any, bound: BoundProgram | None = None) -> None:
    """Raise ModError if what the lists of a mask depend on has changed.

    bound: the trace of mask.mask_mod now, if it is at hand.
    """
    reading = mask._reading
    if reading is None or reading.mod is not mask.mask_mod:
        return
    check_counts(mask)
    then, source = reading.bound, reading.source
    now = bound if source is reading.mod else None
    if then is not None:
        if now is not None and _same(then, now):
            return
        found = dependencies(source)
        if found is not None and reading.found is not None and _unchanged(reading.found, found):
            return
    if now is None:
        with torch.no_grad():
            now = trace_mask(source, mask.device)
    if then is not None:
        _compare(source, then, now)
    mask._reading = _read(reading.mod, source, now)


def check_counts(mask: Any) -> None:
    """Raise ModError if a tensor that the lists of a mask depend on was changed in place."""
    reading = mask._reading
    if reading is None or reading.mod is not mask.mask_mod:
        return
    for tensor, count in zip(reading.tensors, reading.counts, strict=True):
        if tensor._version != count:
            _explain_change(reading.source, tensor)


def _same(then: BoundProgram, now: BoundProgram) -> bool:
    """Whether two traces are one, without looking into tensors."""
    return (
        (then.program is now.program or then.program.digest == now.program.digest)
        and all(map(operator.is_, then.tensors, now.tensors))
        and repr(then.numbers) == repr(now.numbers)  # tells -0.0 from 0.0, and 1 from 1.0
    )


def _unchanged(then: Dependencies, now: Dependencies) -> bool:
    return (
        len(then.tensors) == len(now.tensors)
        and all(map(operator.is_, then.tensors, now.tensors))
        and repr(then.numbers) == repr(now.numbers)
        and then.key == now.key
    )


def _compare(mod: Any, then: BoundProgram, now: BoundProgram) -> None:
    """Raise ModError where a trace differs from that of the build."""
    if then.program.digest != now.program.digest:
        what = "it computes something else, as a flag, a dtype or a function that it uses is not"
        _explain(mod, f"{what} the same")
    for old, new in zip(then.numbers, now.numbers, strict=True):
        if repr(old) != repr(new):
            name = number_name(mod, new)
            what = repr(name) if name else "a number that it uses"
            _explain(mod, f"{what} was {old} and is {new} now")
    for before, tensor in zip(then.tensors, now.tensors, strict=True):
        if not _equal(before, tensor):
            name = name_of(mod, tensor)
            what = repr(name) if name else "a tensor that it computes"
            shape = list(tensor.shape)
            _explain(mod, f"{what}, now of shape {shape}, is another tensor with other values")


def _equal(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether tensors hold the same; those that cannot be compared are taken for equal."""
    if then is now or torch._C._len_torch_dispatch_stack():
        return True
    if type(then) not in _PLAIN_TYPES or type(now) not in _PLAIN_TYPES:
        return True
    if transforms.is_mapped(then) or transforms.is_mapped(now):
        return True
    with torch.no_grad(), transforms.outside():
        return _equal_values(transforms.plain(then), transforms.plain(now))


def _equal_values(then: torch.Tensor, now: torch.Tensor) -> bool:
    if then.shape != now.shape or then.dtype != now.dtype:
        return False
    if then.is_meta or now.is_meta or (now.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    then = then.to(now.device)
    if torch.equal(then, now):
        return True
    # here NaN equals itself
    return now.is_floating_point() and bool(((then == now) | (then.isnan() & now.isnan())).all())


def _explain_change(mod: Any, tensor: torch.Tensor) -> None:
    captured = name_of(mod, tensor)
    raise ModError(
        f"{repr(captured) if captured else 'a tensor'} of shape {list(tensor.shape)}, which "
        f"mask_mod '{mod_name(mod)}' captures, was changed in place after its BlockMask was built. "
        "Which tiles are empty or full follows from the old values, single scores from the new "
        "ones. Build the mask again after the change, or let the mask_mod capture a copy "
        "(.clone())."
    )


def _explain(mod: Any, what: str) -> None:
    raise ModError(
        f"mask_mod '{mod_name(mod)}' is not what it was when its BlockMask was built: {what}. "
        "Which tiles are empty or full follows from the old values, single scores from the new "
        "ones. Build the mask again after the change, or let the mask_mod keep its values, for "
        "example as default arguments: def mask_mod(b, h, q_idx, kv_idx, window=window)."
    )
