"""A prefix that sees itself in both directions, then causal text."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, check_values, read_integers, read_size
from attnloom.mods.extent import of_table
from attnloom.trace.names import known_as


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
    name = "prefix_lm"
    if isinstance(prefix_length, int):
        return _one_length(read_size(name, "prefix_length", prefix_length))
    prefix_length = read_integers(name, "prefix_length", prefix_length, 0, 1)
    valid = prefix_length >= 0
    check_values(name, "prefix_length", prefix_length, valid, "a length is 0 or more")
    if prefix_length.dim() == 0:
        return _one_length(prefix_length)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix_length[b]) | (q_idx >= kv_idx)

    return limited(mask_mod, *of_table(name, "prefix_length", prefix_length, "batch"))


def _one_length(prefix_length: int | Tensor) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix_length) | (q_idx >= kv_idx)

    return known_as(mask_mod, "prefix_lm.mask_mod")
