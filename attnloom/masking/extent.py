"""The sizes that a mod is for, as far as what made it knows them.

A table of 10 ids cannot say what token 12 sees; a kernel would clamp the index and read the last
id. Factories of mods note such sizes on the function they return, combinators hand them on, and
create_block_mask and flex_attention compare them with the call's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from attnloom.errors import ShapeError

Axis = Literal["batch", "heads", "Q_LEN", "KV_LEN"]
LENGTHS: tuple[Axis, ...] = ("Q_LEN", "KV_LEN")
ATTRIBUTE = "_attnloom_extent"

Mod = TypeVar("Mod")


@dataclass(frozen=True, slots=True)
class Limit:
    """One size that a mod is for.

    exact: smaller calls are mistakes as well (a grid of another width, slopes of other heads).
    source: who says so, as a message begins: "documents: ids has shape [10]".
    binding: larger calls are mistakes; else they mean something, and the size only tells what a
        call is likely to have.
    """

    axis: Axis
    size: int
    exact: bool
    source: str
    binding: bool = True


def limited(mod: Mod, *limits: Limit) -> Mod:
    """The mod itself, with these limits noted on it in place of earlier ones."""
    if limits or hasattr(mod, ATTRIBUTE):
        setattr(mod, ATTRIBUTE, tuple(dict.fromkeys(limits)))
    return mod


def limits_of(*mods: Any, axes: Collection[Axis] = ("batch", "heads", *LENGTHS)) -> list[Limit]:
    """All limits that mods have on some axes; none for functions of the user's own."""
    return [limit for mod in mods for limit in getattr(mod, ATTRIBUTE, ()) if limit.axis in axes]


def check(mod: Any, sizes: Mapping[Axis, int]) -> None:
    """Raise ShapeError where a call's sizes are not those that a mod is for."""
    for limit in getattr(mod, ATTRIBUTE, ()):
        size = sizes.get(limit.axis, 0 if not limit.exact else limit.size)
        if limit.binding and (size > limit.size or (limit.exact and size != limit.size)):
            reach = "exactly" if limit.exact else "at most"
            raise ShapeError(
                f"{limit.source}, which serves {limit.axis} of {reach} {limit.size}; this call has "
                f"{limit.axis} {size}. Make the mod for the sizes of the call: it has no values "
                "for others."
            )
