"""The window with gaps."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def dilated_window(window_left: int, dilation: int, window_right: int = 0) -> MaskMod:
    """Every dilation-th token of a window.

        d = q_idx - kv_idx;  d % dilation == 0 and -window_right <= d / dilation <= window_left

    Args:
        window_left, window_right: keys seen before and after the query, itself excluded, 0 or
            more. The farthest lies window_left * dilation tokens back.
        dilation: distance between them, 1 or more; 1 is a window without gaps.
    Returns:
        mask_mod.
    Raises:
        ModError: a window is negative, or dilation < 1.
    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150, sec. 3.1 (dilated sliding window).
    """
    name = "dilated_window"
    dilation = read_size(name, "dilation", dilation, 1)
    back = read_size(name, "window_left", window_left) * dilation
    ahead = read_size(name, "window_right", window_right) * dilation

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= -ahead) & (distance <= back) & (distance % dilation == 0)

    return mask_mod
