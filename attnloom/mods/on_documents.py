"""A mod inside each packed document."""

from __future__ import annotations

from attnloom.errors import OptionError
from attnloom.masking.extent import limited, limits_of
from attnloom.masking.known_masks import (
    check_cumulative,
    document_mod,
    documents_of,
    packed_documents,
    packed_mod,
)
from attnloom.mods.arguments import Integers, read_integers
from attnloom.mods.extent import of_packed, of_tokens
from attnloom.mods.logical_to_physical import logical_to_physical
from attnloom.mods.mod_kinds import Mod, kind_of_mod, on_positions
from attnloom.trace.names import known_as


def on_documents(
    mod: Mod, *, cu_seqlens: Integers | None = None, ids: Integers | None = None
) -> Mod:
    """A mod inside each packed document: positions count from the document's start.

    Args:
        mod: a mask_mod, which then also hides other documents, or a score_mod, which does not (join
            it with `documents`).
        cu_seqlens: [documents + 1] integers, cumulative lengths from 0; the mod sees each document
            as a batch entry of its own: b is its number.
        ids: [S] or [B, S] integers instead, in any order: b is the batch entry as ever, positions
            are how many earlier tokens carry the same id.
    Returns:
        A mod of the same kind, capturing tables [S].
    Raises:
        ModError: mod is neither. OptionError: not exactly one of cu_seqlens and ids is given.
        DtypeError, ShapeError: they are not integers.
    Source: Dong et al. 2024, arXiv:2412.05496; BlockMask.from_cu_seqlens and
        from_document_ids give the same masks.
    """
    kind = kind_of_mod(mod)
    if (cu_seqlens is None) == (ids is None):
        given = "neither is given" if ids is None else "both are given"
        raise OptionError(f"on_documents: {given}; exactly one of cu_seqlens and ids must be.")
    if ids is not None:
        rows = read_integers("on_documents", "ids", ids, 1, 2)
        found = documents_of(*(rows if rows.dim() == 2 else rows[None],) * 2)
        limits = [*of_tokens("on_documents", "ids", rows), *limits_of(mod, axes=("batch", "heads"))]
        if kind == "mask_mod":
            return limited(known_as(document_mod(found, mod), "on_documents"), *limits)
        ranks = found.rank_q if rows.dim() == 2 else found.rank_q[0]
        return limited(logical_to_physical(mod, ranks), *limits)
    cu = read_integers("on_documents", "cu_seqlens", cu_seqlens, 1)  # type: ignore[arg-type]
    check_cumulative("on_documents: cu_seqlens", cu)
    length = int(cu[-1]) if cu.numel() else 0
    ranges, tables = packed_documents(cu, cu, (length + (kind == "mask_mod"), length), causal=False)
    if kind == "mask_mod":
        moved = known_as(packed_mod(ranges, tables, mod), "on_documents")
        told = of_packed("on_documents", "cu_seqlens", length)
        return limited(moved, *limits_of(mod, axes=("heads",)), *told)
    number, first, _ = tables
    number, first = number.int(), first.int()
    moved = on_positions(
        "on_documents",
        mod,
        lambda b, q_idx, kv_idx: (number[q_idx], q_idx - first[q_idx], kv_idx - first[kv_idx]),
    )
    # b is the number of a document there: limits on the batch are not the call's.
    return limited(moved, *limits_of(mod, axes=("heads",)))
