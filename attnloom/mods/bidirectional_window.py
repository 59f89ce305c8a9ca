"""The window on both sides."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def bidirectional_window(window_left: int, window_right: int | None = None) -> MaskMod:
    """Each token sees itself, window_left tokens before it and window_right after it.

        -window_right <= q_idx - kv_idx <= window_left

    Args:
        window_left, window_right: keys before and after the query, itself excluded, 0 or more
            (FlashAttention's window_size); window_right defaults to window_left.
    Returns:
        mask_mod.
    Raises:
        ModError: a window is negative.
    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150, sec. 3.1.
    """
    name = "bidirectional_window"
    left = read_size(name, "window_left", window_left)
    right = left if window_right is None else read_size(name, "window_right", window_right)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= -right) & (distance <= left)

    return mask_mod
