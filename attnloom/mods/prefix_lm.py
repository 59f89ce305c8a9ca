"""A prefix that sees itself in both directions, then causal text."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, check_values, read_integers, read_size
from attnloom.mods.extent import of_table


def prefix_lm(prefix_length: int | Integers) -> MaskMod:
    """Causal, but every token sees the whole prefix.

        kv_idx < prefix_length or q_idx >= kv_idx

    Args:
        prefix_length: one length for all, 0 or more, or [B] integers, one a batch entry.
    Returns:
        mask_mod; it captures the lengths if there is one a batch entry.
    Raises:
        ModError: a single length is negative. DtypeError, ShapeError: lengths are not [B] integers.
    Source: Raffel et al. 2020 (T5), arXiv:1910.10683, sec. 3.2.1.
    """
    if isinstance(prefix_length, int):
        length = read_size("prefix_lm", "prefix_length", prefix_length)
        by_batch = None
    else:
        length, by_batch = 0, read_integers("prefix_lm", "prefix_length", prefix_length, 0, 1)
    if by_batch is not None:
        check_values("prefix_lm", "prefix_length", by_batch, by_batch >= 0, "a length is 0 or more")
    batched = by_batch is not None and by_batch.dim() == 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if by_batch is None:
            stop = length
        else:
            stop = by_batch[b] if batched else by_batch
        return (kv_idx < stop) | (q_idx >= kv_idx)

    if by_batch is None or not batched:
        return mask_mod
    return limited(mask_mod, *of_table("prefix_lm", "prefix_length", by_batch, "batch"))
