"""Calls that are like an earlier one: its launch again, without validating, tracing or planning.

Alike are calls with inputs of one form (shapes, strides, dtypes, device), mods of which
`trace/snapshots.py` says that they do the same, the same BlockMask with the lists it had, and equal
options, under the same modes of torch. They differ in what their tensors hold and where that lies.

Not looked up: tensor subclasses, tensors with a negative bit, dispatch modes and functorch
transforms, caches, mods that snapshots or templates do not know, and calls whose mods differ from
time to time (numbers that count steps). An entry ends with its mask, and holds no tensor of the
caller's beyond its lists.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from attnloom.api.autograd import PLAIN_TYPES, num_dispatch_modes, transforms_active
from attnloom.api.call import Call
from attnloom.api.launch import Launch
from attnloom.backends.registry import Again
from attnloom.block_mask import BlockLists, BlockMask
from attnloom.ir.node import DType
from attnloom.masking import versions
from attnloom.masking.views import noop_mask
from attnloom.plan.problem import compute_type
from attnloom.trace import captures, snapshots
from attnloom.trace.snapshots import Snapshot

_LIMIT = 1024
_MOST_MET = 4096
_VARIANTS = 8  # of one key: layers whose mods differ in numbers, say
_MOST_MISSES = 64  # of one key, beyond its hits: mods that are never the same again
_UNKNOWN_KIND = 20  # misses that count for one whose mods are not taken
_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """An earlier call.

    mask: of its block_mask's mod, None where there is none to look at; lists: what it held.
    places: where the launch's tensors are among those of score and mask. detached: the first of
        them that is the mask's, if any wants a gradient. held: the mask's, of which others are
        compared with those that it was built from.
    """

    launch: Launch
    score: Snapshot | None
    mask: Snapshot | None
    lists: BlockLists | None
    places: tuple[int, ...]
    detached: int | None
    held: tuple[weakref.ref[torch.Tensor], ...]


class Bucket:
    """Calls of one key. block_mask: the one that it is about, if it lives."""

    __slots__ = ("__weakref__", "block_mask", "hits", "misses", "seen")

    def __init__(self, block_mask: weakref.ref[BlockMask] | None) -> None:
        self.block_mask = block_mask
        self.seen: list[_Seen] = []
        self.hits = self.misses = 0


_buckets: dict[tuple[object, ...], Bucket] = {}
_met: set[int] = set()  # hashes of keys that were met at least once
_lock = threading.Lock()


def clear() -> None:
    """Forget every call."""
    _buckets.clear()
    _met.clear()


def key_of(call: Call) -> tuple[object, ...] | None:
    """What calls are looked up by; None for calls that are not."""
    query, key, value, score_mod, block_mask, scale, enable_gqa, options = call
    if (
        type(query) not in PLAIN_TYPES
        or type(key) not in PLAIN_TYPES
        or type(value) not in PLAIN_TYPES
        or transforms_active()
        or num_dispatch_modes()
        or not (block_mask is None or type(block_mask) is BlockMask)
        or not (enable_gqa is False or enable_gqa is True)
        or not (scale is None or type(scale) is float)
        or query._is_zerotensor()
        or key._is_zerotensor()
        or value._is_zerotensor()
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
    ):
        return None
    try:
        options_said = said(options)
        hash(options_said)
        return (
            0 if score_mod is None else id(code_of(score_mod)),
            0 if block_mask is None else id(block_mask),
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            scale or str(scale),  # 0.0 == -0.0
            enable_gqa,
            options_said,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )
    except (AttributeError, RuntimeError, TypeError):
        return None  # a callable object, a sparse or a nested tensor, an option without a hash


def said(options: Any) -> tuple[object, ...] | None:
    """kernel_options as they are compared: True is not 1."""
    return None if options is None else (*options.items(), *map(type, options.values()))


def code_of(mod: Any) -> CodeType:
    """Raises AttributeError for callables of other kinds than functions, methods and partials."""
    return mod.func.__code__ if type(mod) is functools.partial else mod.__code__


def find(key: tuple[object, ...], call: Call) -> tuple[Bucket, Launch, _Tensors] | None:
    """The launch of an earlier call like this one, where it was found, and the captured tensors to
    run it with.

    Raises:
        ModError: a tensor that the mask was built from was changed since.
    """
    bucket = _buckets.get(key)
    if bucket is None:
        return None
    known = found(bucket, call.score_mod, call.block_mask)
    return None if known is None else (bucket, *known)


def found(bucket: Bucket, score_mod: Any, block_mask: Any) -> tuple[Launch, _Tensors] | None:
    """The launch of a bucket for these mods, as they are now, and what they capture; raises as
    `find`."""
    mask_mod = None
    if block_mask is not None:
        if bucket.block_mask is None or bucket.block_mask() is not block_mask:
            return None
        mask_mod = block_mask.mask_mod
    for seen in bucket.seen:
        tensors = _captured(seen, score_mod, mask_mod)
        if tensors is None:
            continue
        if block_mask is not None:
            if block_mask._lists is not seen.lists:
                continue
            reading = block_mask._reading
            if reading is not None and reading.tensors:
                versions.check_counts(block_mask)
        bucket.hits += 1
        return seen.launch, tensors
    return None


def _captured(seen: _Seen, score_mod: Any, mask_mod: Any) -> _Tensors | None:
    """Tensors of a call that is like `seen`, in the order of its launch; None for another."""
    if seen.score is None:
        found: list[torch.Tensor] = []
    else:
        of_score = seen.score.tensors(score_mod)
        if of_score is None:
            return None
        found = of_score
    if seen.mask is None:
        if mask_mod is not None and mask_mod is not noop_mask:
            return None
    else:
        of_mask = seen.mask.tensors(mask_mod)
        if of_mask is None:
            return None
        if of_mask:
            for reference, tensor in zip(seen.held, of_mask, strict=True):
                if reference() is not tensor:
                    return None
            found += of_mask
    if not found:
        return ()
    tensors = tuple([found[place] for place in seen.places])
    if seen.detached is not None:
        first = seen.detached
        tensors = (*tensors[:first], *(t.detach() for t in tensors[first:]))
    return tensors


def keep(key: tuple[object, ...], call: Call, launch: Launch) -> None:
    """Remember what became of a call that is met for the second time, if a third one can be told to
    be like it."""
    block_mask = call.block_mask
    with _lock:
        bucket = _buckets.get(key)
        if bucket is None or (bucket.block_mask and bucket.block_mask() is not block_mask):
            if not _is_second(hash(key)):
                return
            if len(_buckets) >= _LIMIT:
                _buckets.clear()
            bucket = _buckets[key] = Bucket(_reference(block_mask, key))
        bucket.misses += 1
    if bucket.misses > bucket.hits + _MOST_MISSES:
        return
    seen = _see(call, launch)
    if seen is None:
        bucket.misses += _UNKNOWN_KIND
        return
    # A list that readers iterate over is replaced, never changed.
    bucket.seen = [seen, *bucket.seen][:_VARIANTS]


def _is_second(digest: int) -> bool:
    """Whether a key was met before. Lengths that grow from call to call never are."""
    if digest in _met:
        return True
    if len(_met) >= _MOST_MET:
        _met.clear()
    _met.add(digest)
    return False


def _reference(
    block_mask: BlockMask | None, key: tuple[object, ...]
) -> weakref.ref[BlockMask] | None:
    """To a mask, whose end is that of the bucket."""
    if block_mask is None:
        return None

    def end(gone: object) -> None:
        bucket = _buckets.get(key)
        if bucket is not None and bucket.block_mask is gone:
            del _buckets[key]

    return weakref.ref(block_mask, end)


def _see(call: Call, launch: Launch) -> _Seen | None:
    device, block_mask, plan = call.query.device, call.block_mask, launch.plan
    dtype = compute_type(call.query.dtype, call.key.dtype, call.value.dtype)
    score = mask = lists = None
    of_mask: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    places: list[int] = []
    if call.score_mod is not None:
        bound = captures.recognised("score_mod", call.score_mod, dtype, device)
        taken = None if bound is None else snapshots.take(call.score_mod)
        if bound is None or taken is None:
            return None
        score, found = taken
        if plan.score is not None:
            places += _places(bound.tensors, found)
    count = len(places)
    if block_mask is not None:
        lists, mask_mod = block_mask.lists(), block_mask.mask_mod
        if mask_mod is not noop_mask:
            bound = captures.recognised("mask_mod", mask_mod, DType.F32, device)
            taken = None if bound is None else snapshots.take(mask_mod)
            if bound is None or taken is None:
                return None
            mask, of_mask = taken
            if plan.mask is not None:
                places += [len(found) + place for place in _places(bound.tensors, of_mask)]
            found = [*found, *of_mask]
    if any(t.is_neg() for t in found):
        return None
    wants = any(found[place].requires_grad for place in places[count:])
    again = replace(launch, again=Again())
    held = tuple(map(weakref.ref, of_mask))
    return _Seen(again, score, mask, lists, tuple(places), count if wants else None, held)


def _places(tensors: _Tensors, found: list[torch.Tensor]) -> list[int]:
    """Where each is among those found, by identity."""
    at = {id(tensor): place for place, tensor in enumerate(found)}
    return [at[id(tensor)] for tensor in tensors]
