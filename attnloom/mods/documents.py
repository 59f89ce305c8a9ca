"""Packed documents: several sequences in one row, each of which sees itself alone."""

from __future__ import annotations

import torch

from attnloom.masking.arguments import paired_ids
from attnloom.masking.extent import Axis, Limit, limited
from attnloom.masking.known_masks import (
    check_cumulative,
    document_mod,
    documents_of,
    packed_documents,
    packed_mod,
)
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, read_integers
from attnloom.mods.extent import of_packed, of_table
from attnloom.trace.names import known_as


def documents(ids: Integers, kv_ids: Integers | None = None) -> MaskMod:
    """A query sees the keys that carry its document id.

        ids[q_idx] == kv_ids[kv_idx]

    Args:
        ids: [Q_LEN] or [B, Q_LEN] integers, in any order; documents may be interleaved.
        kv_ids: [KV_LEN] or [B, KV_LEN]; default: ids.
    Returns:
        mask_mod that captures tables of ids, or of key ranges where documents are contiguous. For
        causal documents: and_masks(causal_mask, documents(ids)).
    Raises:
        DtypeError, ShapeError: ids are not integers, have another number of dimensions, or are of
            different batch sizes (1 serves all). DeviceError: they are on different devices.
    Source: Raffel et al. 2020 (T5), arXiv:1910.10683, sec. 3.1.2 (packing); as a mask_mod, Dong
        et al. 2024, arXiv:2412.05496.
    """
    name = "documents"
    of_queries = read_integers(name, "ids", ids, 1, 2)
    of_keys = of_queries if kv_ids is None else read_integers(name, "kv_ids", kv_ids, 1, 2)
    rows = paired_ids((f"{name}: ids", of_queries), ("kv_ids", of_keys))
    limits: list[Limit] = []
    sides: tuple[tuple[str, torch.Tensor, Axis], ...] = (
        ("ids", of_queries, "Q_LEN"),
        ("ids" if kv_ids is None else "kv_ids", of_keys, "KV_LEN"),
    )
    for given, table, axis in sides:
        along: tuple[Axis, ...] = ("batch", axis) if table.dim() == 2 else (axis,)
        limits += of_table(name, given, table, *along)
    return limited(known_as(document_mod(documents_of(*rows), None), name), *limits)


def documents_from_cu_seqlens(cu_seqlens: Integers) -> MaskMod:
    """A query sees the keys of its own document; documents lie one after the other.

        start[q_idx] <= kv_idx < stop[q_idx]

    Args:
        cu_seqlens: [documents + 1] integers, cumulative lengths from 0; lengths may be 0.
    Returns:
        mask_mod that captures the key range of each query, [S] int32. Tokens after the last
        document see nothing.
    Raises:
        DtypeError, ShapeError, OptionError: no cumulative lengths.
    Source: as `documents`; cu_seqlens as in FlashAttention's variable-length functions.
    """
    name = "documents_from_cu_seqlens"
    cu = read_integers(name, "cu_seqlens", cu_seqlens, 1)
    length = int(cu[-1]) if cu.numel() else 0
    check_cumulative(f"{name}: cu_seqlens", cu)
    # One more query, which belongs to no document, is what indices beyond the last are clamped to.
    packed = packed_documents(cu, cu, (length + 1, length), causal=False)
    mask_mod = known_as(packed_mod(*packed, None), name)
    return limited(mask_mod, *of_packed(name, "cu_seqlens", length))
