"""In front of `repeats.py`: the last few calls of each pair of mods, told by one look at tensors.

`repeats.key_of` reads twenty attributes of a call to look it up among all calls. Here query, key
and value are compared with those of the last calls that had the same mod's code and the same mask,
in one step (`trace/forms.py`). Whether the mods still do the same is `repeats.found`'s affair.

Not here: calls under autocast, which converts inputs, and inputs of 8 bits, which may be converted.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from attnloom.api import autocast, autograd, repeats
from attnloom.api.call import Call
from attnloom.trace.forms import Holds, form_of

_LIMIT = 1024
_MOST_FORMS = 8  # of inputs, of one pair of mods

_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Near:
    """A call that was found. holds: whether inputs have the form that its own had. said: its
    kernel_options, as `repeats.key_of` reads them. grad_enabled, real, deterministic: what torch
    was set to. learns: whether it wanted gradients of inputs."""

    holds: Holds
    scale: float | None
    enable_gqa: bool
    said: tuple[object, ...] | None
    grad_enabled: bool
    real: torch.dtype
    deterministic: bool
    learns: bool
    bucket: weakref.ref[repeats.Bucket]


_calls: dict[_Place, list[_Near]] = {}
_lock = threading.Lock()


def clear() -> None:
    """Forget every call."""
    _calls.clear()


def run(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    options: Any,
) -> torch.Tensor | None:
    """The output of a call that is like one of the last, as given to flex_attention; None for
    others. Nothing is checked yet.

    Raises:
        ModError: a tensor that the mask was built from was changed since.
    """
    place = _place_of(score_mod, block_mask)
    calls = None if place is None else _calls.get(place)
    if (
        calls is None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()  # torch's own tracers are in no form's keys
        or _is_nested(query, key, value)
    ):
        return None
    for near in calls:
        if near.scale is not scale and (
            type(scale) is not float or near.scale != scale or not scale
        ):
            continue  # 0.0 == -0.0
        if near.enable_gqa is enable_gqa and near.holds(query, key, value):
            break
    else:
        return None
    bucket = near.bucket()
    if (
        bucket is None
        or near.grad_enabled is not torch.is_grad_enabled()
        or near.real is not torch.get_default_dtype()
        or near.deterministic is not torch.are_deterministic_algorithms_enabled()
        or ((options is not None or near.said is not None) and not _are_said(options, near.said))
    ):
        return None
    found = repeats.found(bucket, score_mod, block_mask)
    if found is None:
        return None
    launch, tensors = found
    learns = near.learns
    if not learns and tensors and near.grad_enabled:
        learns = any([t.requires_grad for t in tensors])  # noqa: C419 - a list is faster
    if learns:
        return autograd.attention_again(launch, query, key, value, tensors, False)[0]
    again = launch.again
    again = None if again is None else again.forwards.get((False, False))
    if again is not None:
        out = again.out(query, key, value, tensors)
        if out is not None:
            return out
    return autograd.attention_again(launch, query, key, value, tensors, False)[0]


def _place_of(score_mod: Any, block_mask: Any) -> _Place | None:
    """None for a partial, a callable object, or no callable."""
    try:
        code = 0 if score_mod is None else id(score_mod.__code__)
    except AttributeError:
        return None
    return code, 0 if block_mask is None else id(block_mask)


def _is_nested(query: Any, key: Any, value: Any) -> bool:
    """Whether one is a nested tensor, which has no sizes: torch's guards end the process; or is no
    tensor."""
    try:
        return query.is_nested or key.is_nested or value.is_nested
    except AttributeError:
        return True


def _are_said(options: Any, said: tuple[object, ...] | None) -> bool:
    try:
        return repeats.said(options) == said
    except (AttributeError, RuntimeError, TypeError):
        return False  # no mapping, or tensors in it: the ordinary way tells what is wrong


def note(call: Call, bucket: repeats.Bucket) -> None:
    """Remember a call that was found in a bucket of `repeats`, now and then: calls of more forms
    than there is room for are not to be written down each time."""
    if bucket.hits & (bucket.hits - 1):
        return
    query, key, value, score_mod, block_mask, scale, enable_gqa, options = call
    if autocast.is_on(query) or min(t.dtype.itemsize for t in (query, key, value)) < 2:
        return
    place = _place_of(score_mod, block_mask)
    if place is None:
        return
    grad_enabled = torch.is_grad_enabled()
    near = _Near(
        form_of((query, key, value)),
        scale,
        enable_gqa,
        repeats.said(options),
        grad_enabled,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        grad_enabled and (query.requires_grad or key.requires_grad or value.requires_grad),
        weakref.ref(bucket),
    )
    with _lock:
        if len(_calls) >= _LIMIT:
            _calls.clear()
        known = _calls.get(place, ())
        others = [n for n in known if (at := n.bucket()) is not None and at is not bucket]
        # a list that readers iterate over is replaced, never changed
        _calls[place] = [near, *others][:_MOST_FORMS]
