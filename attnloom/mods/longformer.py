"""A window, and a few tokens that see all and are seen by all."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_flags, read_size
from attnloom.mods.extent import of_tokens


def longformer(window_left: int, is_global: Tensor, window_right: int | None = None) -> MaskMod:
    """A window on both sides, plus global tokens that see everything and that everything sees.

        -window_right <= q_idx - kv_idx <= window_left or is_global[q_idx] or is_global[kv_idx]

    Args:
        window_left, window_right: keys before and after the query, itself excluded, 0 or more;
            window_right defaults to window_left. The paper's window w is 2 * window_left.
        is_global: [S] or [B, S] bool, or 0 and 1 as Hugging Face's global_attention_mask.
    Returns:
        mask_mod capturing is_global. The paper's second set of projections for global tokens is
        the model's own affair.
    Raises:
        ModError: a window is negative, or is_global is no such tensor.
    Source: Beltagy et al. 2020, arXiv:2004.05150, sec. 3.1 (global + sliding window).
    """
    name = "longformer"
    left = read_size(name, "window_left", window_left)
    right = left if window_right is None else read_size(name, "window_right", window_right)
    is_global = read_flags(name, "is_global", is_global)
    batched = is_global.dim() == 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = is_global[b] if batched else is_global
        distance = q_idx - kv_idx
        return ((distance >= -right) & (distance <= left)) | row[q_idx] | row[kv_idx]

    return limited(mask_mod, *of_tokens(name, "is_global", is_global))
