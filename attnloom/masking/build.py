"""From a mask_mod to block lists: trace, then classify.

Classification is written in torch operators (`classify`) and runs on every device. A backend that
does the same in kernels of its own registers a builder for its type of device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attnloom.ir.node import BoundProgram
from attnloom.masking import reuse, short_captures, transforms
from attnloom.masking.classify import classify
from attnloom.masking.lists import BlockLists, TileGrid
from attnloom.masking.views import MaskMod
from attnloom.trace.tracer import trace_mask

# (mask program, grid, device, separate_full) -> what `classify` returns, or None for grids that are
# not the builder's.
Builder = Callable[[BoundProgram, TileGrid, torch.device, bool], BlockLists | None]

_POSITIONS = ("b", "h", "q", "kv")
_builders: dict[str, Builder] = {}


def register_builder(device_type: str, builder: Builder) -> None:
    """Let a builder have the masks on devices of a type."""
    _builders[device_type] = builder


@dataclass(frozen=True, slots=True)
class Built:
    """Lists, and the traced mask_mod that they follow from."""

    lists: BlockLists
    bound: BoundProgram


def build(
    mask_mod: MaskMod, grid: TileGrid, device: torch.device, separate_full: bool = True
) -> Built:
    """Lists of the live tiles of a mask_mod; never allocates Q_LEN x KV_LEN. Those of an equal
    mask built before are returned again (`reuse`).

    Raises:
        TraceError: mask_mod cannot be traced. UnsupportedError: it captures what torch.vmap maps.
    """
    with torch.no_grad():
        with transforms.inside_again():
            bound = trace_mask(mask_mod, device)
        sizes = (grid.num_batches, grid.num_heads, grid.q_len, grid.kv_len)
        short_captures.warn("mask_mod", mask_mod, bound, dict(zip(_POSITIONS, sizes, strict=True)))
        return Built(_lists(bound, grid, device, separate_full), bound)


@transforms.outside_transforms
def _lists(
    bound: BoundProgram, grid: TileGrid, device: torch.device, separate_full: bool
) -> BlockLists:
    if any(map(transforms.is_wrapped, bound.tensors)):
        bound = replace(bound, tensors=tuple(map(transforms.plain, bound.tensors)))
    return reuse.built(
        bound, grid, device, separate_full, lambda: _build(bound, grid, device, separate_full)
    )


def _build(
    bound: BoundProgram, grid: TileGrid, device: torch.device, separate_full: bool
) -> BlockLists:
    builder = _builders.get(device.type)
    if builder is not None:
        # A builder's kernels read memory, which does not hold the sign of a negative bit.
        as_they_lie = replace(bound, tensors=tuple(t.resolve_neg() for t in bound.tensors))
        found = builder(as_they_lie, grid, device, separate_full)
        if found is not None:
            return found
    return classify(bound, grid, device, separate_full)
