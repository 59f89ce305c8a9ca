"""The table of mods that every implementation is tested with, and how rows enter it.

A row says how to draw what the mod captures and how to build the mod from it, so that the oracle
can build the same mod from float64 copies. Constants that meet positions alone are exact in
float32, where torch rounds them to; logarithmic buckets stay clear of their boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness.draw import Draw, Sizes

Captures = dict[str, torch.Tensor]
ModPair = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True)
class Mod:
    """One variant of attention.

    build: (captures, sizes) -> (score_mod or None, mask_mod or None).
    draw: (sizes, draw) -> captures.
    learnable: names of captures whose gradient is checked.
    mask_axes: which of "b", "h" the mask depends on; the others are broadcast.
    """

    name: str
    build: Callable[[Captures, Sizes], ModPair]
    draw: Callable[[Sizes, Draw], Captures] = lambda sizes, draw: {}
    learnable: tuple[str, ...] = ()
    mask_axes: str = ""


MODS: dict[str, Mod] = {}


def score_row(draw=None, learnable=()):
    """Register a function (captures, sizes) -> score_mod."""

    def register(make):
        row = Mod(make.__name__, lambda c, s: (make(c, s), None), learnable=learnable)
        _add(row, draw)
        return make

    return register


def mask_row(draw=None, axes=""):
    """Register a function (captures, sizes) -> mask_mod."""

    def register(make):
        _add(Mod(make.__name__, lambda c, s: (None, make(c, s)), mask_axes=axes), draw)
        return make

    return register


def pair_row(draw=None, learnable=(), axes=""):
    """Register a function (captures, sizes) -> (score_mod, mask_mod)."""

    def register(make):
        _add(Mod(make.__name__, make, learnable=learnable, mask_axes=axes), draw)
        return make

    return register


def _add(row: Mod, draw) -> None:
    fields = {**row.__dict__, "draw": draw} if draw else row.__dict__
    assert row.name not in MODS
    MODS[row.name] = Mod(**fields)
