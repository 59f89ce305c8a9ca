"""Which devices build block lists in kernels of their own; the others do it in torch operators."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from attnloom.backends.collecting import uncollected
from attnloom.ir.node import BoundProgram
from attnloom.masking.build import register_builder
from attnloom.masking.lists import BlockLists, TileGrid


def register() -> None:
    """Let `masking.build` find the builders; nothing of a backend is imported before it is used."""
    register_builder("cuda", _build_with_triton)


def _build_with_triton(
    bound: BoundProgram, grid: TileGrid, device: torch.device, separate_full: bool
) -> BlockLists | None:
    if not _has_triton():
        return None
    _import_kernels()
    from attnloom.backends.triton import mask_lists

    return mask_lists.build(bound, grid, device, separate_full)


@functools.cache
def _import_kernels() -> None:
    with uncollected():
        importlib.import_module("attnloom.backends.triton.mask_lists")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
