"""Lists that were built before: a layer or a step that builds the same mask again pays for a trace.

Two builds are the same if their programs have one structure and equal numbers, their grids and
flags agree, and their captured tensors hold equal values. Values are compared, not identities: a
new tensor with the same document ids finds the old lists, and no change goes unseen, whether torch
counts it or not.

Rejected, and built every time: masks on other devices than the CPU, where comparing would wait for
the device and lists belong to a stream; captured tensors or lists so large that keeping a copy is a
matter of memory (`MAX_BYTES` each); subclasses of tensors and anything under a dispatch mode.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnloom.ir.node import BoundProgram
from attnloom.masking.lists import BlockLists, TileGrid

MAX_MASKS = 16
MAX_BYTES = 1 << 20

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Lists with copies of the tensors they were made from.

    versions: torch's counts of changes to the lists; somebody may write into them.
    """

    tensors: tuple[torch.Tensor, ...]
    lists: BlockLists
    versions: tuple[int, int]

    def serves(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return self.versions == _versions(self.lists) and all(map(_equal, self.tensors, tensors))


_kept: OrderedDict[_Key, _Kept] = OrderedDict()
_lock = threading.Lock()


def forget() -> None:
    """Drop all lists that are kept."""
    with _lock:
        _kept.clear()


def built(
    bound: BoundProgram,
    grid: TileGrid,
    device: torch.device,
    separate_full: bool,
    build: Callable[[], BlockLists],
) -> BlockLists:
    """The lists of a mask program: those of an equal build before, or what `build` returns."""
    if not _comparable(bound, device):
        return build()
    key = _key(bound, grid, separate_full)
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
    if found is not None and found.serves(bound.tensors):
        return found.lists
    # Copied first: what somebody changes meanwhile differs from the copy, and is built again.
    copies = tuple(t.detach().clone() for t in bound.tensors)
    lists = build()
    if _bytes(lists.row_offsets, lists.entries) <= MAX_BYTES:
        with _lock:
            _kept[key] = _Kept(copies, lists, _versions(lists))
            _kept.move_to_end(key)
            while len(_kept) > MAX_MASKS:
                _kept.popitem(last=False)
    return lists


def _comparable(bound: BoundProgram, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and not torch.is_inference_mode_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in bound.tensors)
        and all(t.device.type == "cpu" for t in bound.tensors)
        and _bytes(*bound.tensors) <= MAX_BYTES
    )


def _key(bound: BoundProgram, grid: TileGrid, separate_full: bool) -> _Key:
    numbers = tuple(map(repr, bound.numbers))  # tells -0.0 from 0.0, and 1 from 1.0
    tensors = tuple((t.dtype, t.shape) for t in bound.tensors)
    return bound.program.digest, numbers, tensors, grid, separate_full


def _equal(kept: torch.Tensor, given: torch.Tensor) -> bool:
    """Equal to a mask: a sign of zero can decide, and NaN is taken for a difference."""
    signed = kept.is_floating_point()
    return torch.equal(kept, given) and not (
        signed and not torch.equal(kept.signbit(), given.signbit())
    )


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _versions(lists: BlockLists) -> tuple[int, int]:
    return lists.row_offsets._version, lists.entries._version
