"""A row for each of attnloom.mods, beside those of MODS: how published variants are tested.

Names begin with "mods.", then that of the factory and, where it has several forms, the form. Tables
that a factory makes itself lie on torch's default device; tensors that it is given are captures,
so that the oracle gets float64 copies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from attnloom import mods
from tests.harness.draw import Draw, Sizes
from tests.harness.table import Captures, Mod

PREFIX = "mods."
Make = Callable[[Captures, Sizes], Any]
Drawn = Callable[[Sizes, Draw], Captures]


@dataclass(frozen=True)
class Published(Mod):
    """square: whether it is a mod of one canvas, and so of as many queries as keys."""

    square: bool = False


PUBLISHED: dict[str, Published] = {}


def draw_nothing(sizes: Sizes, draw: Draw) -> Captures:
    return {}


def mask(
    name: str, make: Make, draw: Drawn = draw_nothing, *, axes: str = "", square: bool = False
) -> None:
    """Add the row of a mask_mod."""
    build = lambda c, s: (None, make(c, s))
    _add(Published(PREFIX + name, build, draw, mask_axes=axes, square=square))


def score(
    name: str, make: Make, draw: Drawn = draw_nothing, learnable: tuple[str, ...] = ()
) -> None:
    """Add the row of a score_mod, under a mask that leaves the first rows empty."""
    pair(name, lambda c, s: (make(c, s), padded_causal(s)), draw, learnable, axes="b")


def pair(
    name: str,
    build: Callable[[Captures, Sizes], tuple[Any, Any]],
    draw: Drawn = draw_nothing,
    learnable: tuple[str, ...] = (),
    *,
    axes: str = "",
    square: bool = False,
) -> None:
    """Add the row of a score_mod with a mask of its own, or None."""
    _add(Published(PREFIX + name, build, draw, learnable, axes, square))


def _add(row: Published) -> None:
    assert row.name not in PUBLISHED
    PUBLISHED[row.name] = row


def padded_causal(s: Sizes) -> Any:
    """Causal behind padding of another length in each batch entry."""
    num_padding = [s.Q_LEN // 3 - b * (s.Q_LEN // 5) for b in range(s.B)]
    return mods.and_masks(mods.causal_mask, mods.left_padding(num_padding))


def canvas_of(s: Sizes) -> tuple[int, int]:
    """The most square grid of as many tokens."""
    assert s.Q_LEN == s.KV_LEN
    height = next(n for n in range(int(s.Q_LEN**0.5), 0, -1) if s.Q_LEN % n == 0)
    return height, s.Q_LEN // height


def sizes_for(row: Published, sizes: Sizes, *lengths: tuple[int, int]) -> list[Sizes]:
    """`sizes` at each of these (Q_LEN, KV_LEN); at (Q_LEN, Q_LEN) for the mods of a canvas."""
    return [
        replace(sizes, Q_LEN=q_len, KV_LEN=q_len if row.square else kv_len)
        for q_len, kv_len in lengths
    ]
