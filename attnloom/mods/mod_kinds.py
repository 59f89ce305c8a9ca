"""What kind of mod a function is, and mods at other positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attnloom.errors import ModError
from attnloom.masking.extent import limited, limits_of
from attnloom.tools.target import kind_of

Mod = Callable[..., Any]


def kind_of_mod(mod: Mod) -> str:
    """ "mask_mod" or "score_mod". Raises ModError for anything else."""
    return kind_of(mod, getattr(mod, "__name__", type(mod).__name__))


def check_kinds(factory: str, mods: Sequence[Mod], kind: str) -> None:
    """Raises ModError unless all mods are of one kind."""
    for place, mod in enumerate(mods):
        if kind_of_mod(mod) != kind:
            raise ModError(
                f"{factory}: argument {place} is {getattr(mod, '__qualname__', mod)!r}, a "
                f"{kind_of_mod(mod)}; every argument must be a {kind}."
            )


def on_positions(mod: Mod, place: Callable[..., tuple[Tensor, ...]]) -> Mod:
    """The mod at (b, q_idx, kv_idx) = place(b, q_idx, kv_idx)."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry, query, key = place(b, q_idx, kv_idx)
        return mod(entry, h, query, key)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry, query, key = place(b, q_idx, kv_idx)
        return mod(score, entry, h, query, key)

    moved = mask_mod if kind_of_mod(mod) == "mask_mod" else score_mod
    return limited(moved, *limits_of(mod, axes=("batch", "heads")))
