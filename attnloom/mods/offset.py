"""A mod of a whole sequence for a part of one."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import limited, limits_of
from attnloom.mods.arguments import read_integers
from attnloom.mods.extent import of_table
from attnloom.mods.mod_kinds import Mod, on_positions


def offset(mod: Mod, q_offset: int | Tensor, kv_offset: int | Tensor = 0) -> Mod:
    """A mod written for whole sequences, for a call that holds only a part of one.

        mod(..., q_idx + q_offset, kv_idx + kv_offset)

    Args:
        mod: a mask_mod or a score_mod.
        q_offset, kv_offset: position of the call's first query and key; an int, a tensor without
            dimensions (another value compiles nothing, and needs no wait for a device), or [B], one
            a batch entry.
    Returns:
        A mod of the same kind.
    Raises:
        ModError: mod is neither. DtypeError, ShapeError: an offset is not an integer.
    """
    q_offset, kv_offset = (
        value if isinstance(value, int) else read_integers("offset", name, value, 0, 1)
        for name, value in (("q_offset", q_offset), ("kv_offset", kv_offset))
    )

    def move(by: int | Tensor, b: Tensor, index: Tensor) -> Tensor:
        return index + (by[b] if isinstance(by, Tensor) and by.dim() else by)

    moved = on_positions(
        "offset",
        mod,
        lambda b, q_idx, kv_idx: (b, move(q_offset, b, q_idx), move(kv_offset, b, kv_idx)),
    )
    limits = limits_of(moved)
    for name, by in (("q_offset", q_offset), ("kv_offset", kv_offset)):
        if isinstance(by, Tensor) and by.dim():
            limits += of_table("offset", name, by, "batch")
    return limited(moved, *limits)
