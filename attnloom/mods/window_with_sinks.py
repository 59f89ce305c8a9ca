"""The sliding window that keeps the first tokens in sight."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def window_with_sinks(window_left: int, num_sinks: int = 4) -> MaskMod:
    """Causal; each token sees the window before it and the first tokens of all (attention sinks).

        q_idx >= kv_idx and (q_idx - kv_idx <= window_left or kv_idx < num_sinks)

    Args:
        window_left: keys before the query, itself excluded, 0 or more.
        num_sinks: first tokens that stay visible, 0 or more.
    Returns:
        mask_mod.
    Raises:
        ModError: an argument is negative.
    Source: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453, sec. 3.2.
    """
    name = "window_with_sinks"
    window_left = read_size(name, "window_left", window_left)
    num_sinks = read_size(name, "num_sinks", num_sinks)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance <= window_left) | (kv_idx < num_sinks))

    return mask_mod
