"""The causal sliding window."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def sliding_window(window_left: int) -> MaskMod:
    """Causal; each token sees itself and window_left tokens before it.

        0 <= q_idx - kv_idx <= window_left

    Args:
        window_left: keys before the query, itself excluded (FlashAttention's convention), 0 or
            more. A "window of w tokens" that counts the query, as in Mistral's code, is
            window_left = w - 1.
    Returns:
        mask_mod.
    Raises:
        ModError: window_left is negative.
    Source: Beltagy et al. 2020, arXiv:2004.05150, sec. 3.1; Jiang et al. 2023 (Mistral),
        arXiv:2310.06825, sec. 2.
    """
    window_left = read_size("sliding_window", "window_left", window_left)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= window_left)

    return mask_mod
