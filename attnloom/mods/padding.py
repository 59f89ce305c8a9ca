"""Padding on the right, on the left, or anywhere."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import Axis, limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, check_values, read_flags, read_integers
from attnloom.mods.extent import of_table


def right_padding(lengths: Integers) -> MaskMod:
    """Hide the keys at the end of batch entries that end early.

        kv_idx < lengths[b]

    Args:
        lengths: [B] integers, tokens of each batch entry; 0 leaves it without keys.
    Returns:
        mask_mod capturing lengths. Padded queries are not hidden, their rows are to be ignored.
    Raises:
        DtypeError, ShapeError: lengths are not [B] integers.
    Source: the key padding mask of Vaswani et al. 2017, arXiv:1706.03762, in every implementation.
    """
    lengths = read_integers("right_padding", "lengths", lengths, 1)
    check_values("right_padding", "lengths", lengths, lengths >= 0, "a length is 0 or more")

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return limited(mask_mod, *of_table("right_padding", "lengths", lengths, "batch"))


def left_padding(num_padding: Integers) -> MaskMod:
    """Hide the keys at the beginning of batch entries that start late, as for generation.

        kv_idx >= num_padding[b]

    Args:
        num_padding: [B] integers, tokens of padding before each batch entry.
    Returns:
        mask_mod capturing num_padding. Together with a causal mask padded queries see nothing and
        give 0.
    Raises:
        DtypeError, ShapeError: num_padding is not [B] integers.
    Source: as `right_padding`.
    """
    num_padding = read_integers("left_padding", "num_padding", num_padding, 1)
    check_values(
        "left_padding", "num_padding", num_padding, num_padding >= 0, "padding is 0 tokens or more"
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= num_padding[b]

    return limited(mask_mod, *of_table("left_padding", "num_padding", num_padding, "batch"))


def key_padding(attention_mask: Tensor) -> MaskMod:
    """Hide the keys that a table marks as padding, wherever they are.

        attention_mask[b, kv_idx]

    Args:
        attention_mask: [B, KV_LEN] or [KV_LEN], bool or 0 and 1, true where a key is kept (as
            tokenizers return it).
    Returns:
        mask_mod capturing the table.
    Raises:
        ModError: attention_mask is no such tensor.
    Source: as `right_padding`.
    """
    attention_mask = read_flags("key_padding", "attention_mask", attention_mask)
    batched = attention_mask.dim() == 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return attention_mask[b, kv_idx] if batched else attention_mask[kv_idx]

    leading: tuple[Axis, ...] = ("batch",) if batched else ()
    return limited(
        mask_mod, *of_table("key_padding", "attention_mask", attention_mask, *leading, "KV_LEN")
    )
