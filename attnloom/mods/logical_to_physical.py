"""A mod of logical positions for tokens that lie elsewhere."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import LENGTHS, Axis, limited, limits_of
from attnloom.mods.arguments import read_integers
from attnloom.mods.extent import of_table
from attnloom.mods.mod_kinds import Mod, kind_of_mod, on_positions


def logical_to_physical(
    mod: Mod, q_positions: Tensor | None = None, kv_positions: Tensor | None = None
) -> Mod:
    """A mod of logical positions, for tokens that lie elsewhere in memory.

        mod(..., q_positions[b, q_idx], kv_positions[b, kv_idx])

    Args:
        mod: a mask_mod or a score_mod of logical positions.
        q_positions: [Q_LEN] or [B, Q_LEN] integers, the logical position of the query in each
            place; -1 where there is none. Default: places are positions.
        kv_positions: the same of keys, as the slots of a paged cache; default: q_positions.
    Returns:
        A mod of the same kind. A mask_mod drops empty places; a score_mod sees position 0 there.
    Raises:
        ModError: mod is neither. DtypeError, ShapeError: positions are no integers.
    Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180, sec. 4.1; with mods, Dong et
        al. 2024, arXiv:2412.05496.
    """
    q_positions, kv_positions = (
        None if given is None else read_integers("logical_to_physical", name, given, 1, 2)
        for name, given in (
            ("q_positions", q_positions),
            ("kv_positions", kv_positions),
        )
    )

    def look_up(table: Tensor | None, b: Tensor, index: Tensor) -> Tensor:
        if table is None:
            return index
        return (table[b, index] if table.dim() == 2 else table[index]).long()

    def logical(b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, ...]:
        of_keys = q_positions if kv_positions is None else kv_positions
        return b, look_up(q_positions, b, q_idx), look_up(of_keys, b, kv_idx)

    limits = limits_of(mod, axes=("batch", "heads"))
    both = q_positions if kv_positions is None else kv_positions
    tables = (("q_positions", q_positions), ("kv_positions", both))
    for (name, table), axis in zip(tables, LENGTHS, strict=True):
        if table is not None:
            along: tuple[Axis, ...] = ("batch", axis)[2 - table.dim() :]
            limits += of_table("logical_to_physical", name, table, *along)

    if kind_of_mod(mod) == "score_mod":
        moved = on_positions(
            "logical_to_physical",
            mod,
            lambda b, q_idx, kv_idx: tuple(x.clamp(min=0) for x in logical(b, q_idx, kv_idx)),
        )
        return limited(moved, *limits)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        _, query, key = logical(b, q_idx, kv_idx)
        return (query >= 0) & (key >= 0) & mod(b, h, query, key)

    return limited(mask_mod, *limits)
