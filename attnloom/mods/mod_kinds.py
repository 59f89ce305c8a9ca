"""What kind of mod a function is, and mods at other positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import CO_VARARGS
from typing import Any

from torch import Tensor

from attnloom.block_mask import BlockMask
from attnloom.errors import ModError
from attnloom.masking.extent import limited, limits_of
from attnloom.tools.target import kind_of
from attnloom.trace.names import known_as, mod_name

Mod = Callable[..., Any]


def kind_of_mod(mod: Mod) -> str:
    """ "mask_mod" or "score_mod". Raises ModError for anything else."""
    return kind_of(mod, mod_name(mod))


def check_functions(factory: str, mods: Sequence[Mod], what: str) -> None:
    """Raises ModError for what is often given in place of mods."""
    for place, mod in enumerate(mods):
        if isinstance(mod, (list, tuple, BlockMask)):
            raise ModError(
                f"{factory}: argument {place} is a {type(mod).__name__}; every argument must be a "
                f"{what}. Pass the functions themselves, not a list of them or a BlockMask."
            )


def check_kinds(factory: str, mods: Sequence[Mod], kind: str) -> None:
    """Raises ModError unless all mods are of one kind."""
    check_functions(factory, mods, kind)
    for place, mod in enumerate(mods):
        if not _takes_any(mod) and kind_of_mod(mod) != kind:
            raise ModError(
                f"{factory}: argument {place} is {mod_name(mod)!r}, a "
                f"{kind_of_mod(mod)}; every argument must be a {kind}."
            )


def _takes_any(mod: Mod) -> bool:
    """Whether it takes any number of arguments, and so is of either kind."""
    code = getattr(inspect.unwrap(mod), "__code__", None)
    return code is not None and not code.co_argcount and bool(code.co_flags & CO_VARARGS)


def on_positions(factory: str, mod: Mod, place: Callable[..., tuple[Tensor, ...]]) -> Mod:
    """The mod at (b, q_idx, kv_idx) = place(b, q_idx, kv_idx), made by a factory."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry, query, key = place(b, q_idx, kv_idx)
        return mod(entry, h, query, key)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry, query, key = place(b, q_idx, kv_idx)
        return mod(score, entry, h, query, key)

    moved = mask_mod if kind_of_mod(mod) == "mask_mod" else score_mod
    return limited(known_as(moved, factory), *limits_of(mod, axes=("batch", "heads")))
