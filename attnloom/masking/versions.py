"""Notices that a tensor which a mask was made from has been changed in place since.

The lists of a mask are made once; scores of partial tiles ask the mask_mod, which reads its
captured tensors as they are by then. Once the two differ, whole tiles follow the old values and
single scores the new ones. torch counts the in-place changes of every tensor, together with those
of its views, so that comparing the counts tells.

Not noticed: changes that torch does not count (through numpy, `.data` or a kernel of one's own),
tensors made under inference_mode, and what happened before a mask came through a pytree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom.errors import ModError
from attnloom.masking.captures import captured_tensors
from attnloom.trace.names import mod_name, name_of


@dataclass(frozen=True, slots=True)
class Reading:
    """Captured tensors and how often each had been changed when lists were made from them.

    mod: the mask_mod of the mask. A mask that was given another one since is its user's affair.
    """

    mod: Any
    tensors: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]


def read(mod: Any) -> Reading | None:
    """The state of what a mod captures now; None if it captures nothing."""
    tensors = tuple(t for t in captured_tensors(mod) if not t.is_inference())
    return Reading(mod, tensors, tuple(t._version for t in tensors)) if tensors else None


def handed_on(reading: Reading | None, mod: Any) -> Reading | None:
    """The same state, for a mask that was made from another one's lists."""
    return None if reading is None else replace(reading, mod=mod)


def check(mask: Any) -> None:
    """Raise ModError if a tensor that the lists of a mask depend on has changed."""
    reading = mask._reading
    if reading is None or reading.mod is not mask.mask_mod:
        return
    for tensor, count in zip(reading.tensors, reading.counts, strict=True):
        if tensor._version != count:
            _explain(mask.mask_mod, tensor)


def _explain(mod: Any, tensor: torch.Tensor) -> None:
    captured = name_of(mod, tensor)
    raise ModError(
        f"{repr(captured) if captured else 'a tensor'} of shape {list(tensor.shape)}, which "
        f"mask_mod '{mod_name(mod)}' captures, was changed in place after its BlockMask was built. "
        "Which tiles are empty or full follows from the old values, single scores from the new "
        "ones. Build the mask again after the change, or let the mask_mod capture a copy "
        "(.clone())."
    )
