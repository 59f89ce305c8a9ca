"""One prefix, read once, for many documents that continue it."""

from __future__ import annotations

from torch import Tensor

from attnloom.errors import ModError, counted
from attnloom.masking.extent import limited
from attnloom.masking.known_masks import check_cumulative, packed_documents
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, read_integers, read_size
from attnloom.mods.extent import of_packed


def shared_prefix(prefix_length: int, cu_seqlens: Integers) -> MaskMod:
    """Causal documents behind a prefix that all of them see, and that sees none of them.

        q_idx >= kv_idx and (kv_idx < prefix_length or start[q_idx] <= kv_idx)

    Args:
        prefix_length: tokens 0 .. prefix_length - 1 are the prefix, 0 or more.
        cu_seqlens: [documents + 1] integers, cumulative lengths of the documents, counted from the
            end of the prefix; lengths may be 0.
    Returns:
        mask_mod capturing the first token of each token's document, [S + 1] int32. Tokens after the
        last document see the prefix alone.
    Raises:
        ModError: prefix_length is negative, or there is no document.
        DtypeError, ShapeError, OptionError: no cumulative lengths.
    Source: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099, sec. 3.
    """
    name = "shared_prefix"
    prefix_length = read_size(name, "prefix_length", prefix_length)
    cu = read_integers(name, "cu_seqlens", cu_seqlens, 1)
    if cu.numel() < 2:
        raise ModError(
            f"{name}: cu_seqlens has {counted(cu.numel(), 'element')}; it must hold 0 and the end "
            "of each document. Without documents, use causal_mask."
        )
    check_cumulative(f"{name}: cu_seqlens", cu)
    length = int(cu[-1])
    _, (_, first, _) = packed_documents(cu, cu, (length, length), causal=False)
    # The prefix is causal in itself; one more token, beyond the last, belongs to no document.
    total = prefix_length + length
    start = first.new_full((total + 1,), total)
    start[:prefix_length] = 0
    start[prefix_length:-1] = first + prefix_length
    start = start.int()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = (kv_idx >= start[q_idx]) & (kv_idx < total)
        return (q_idx >= kv_idx) & ((kv_idx < prefix_length) | own)

    return limited(mask_mod, *of_packed(name, "prefix_length + cu_seqlens", total))
