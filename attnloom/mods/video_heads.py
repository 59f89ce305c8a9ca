"""The two kinds of heads that video models turn out to have."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def spatial_head(frame_size: int, window_frames: int = 0) -> MaskMod:
    """A token sees its own frame and the frames near it.

        |q_idx // frame_size - kv_idx // frame_size| <= window_frames

    Args:
        frame_size: tokens of a frame, 1 or more; frames lie one after the other.
        window_frames: frames on each side, 0 or more.
    Returns:
        mask_mod.
    Raises:
        ModError: an argument is too small.
    Source: Xi et al. 2025 (Sparse VideoGen), arXiv:2502.01776 (spatial heads).
    """
    frame_size = read_size("spatial_head", "frame_size", frame_size, 1)
    window_frames = read_size("spatial_head", "window_frames", window_frames)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // frame_size - kv_idx // frame_size).abs() <= window_frames

    return mask_mod


def temporal_head(frame_size: int, window_tokens: int = 0) -> MaskMod:
    """A token sees the same place, and places near it, in every frame.

        |q_idx % frame_size - kv_idx % frame_size| <= window_tokens

    Args:
        frame_size: tokens of a frame, 1 or more.
        window_tokens: places on each side, in the order of the frame, 0 or more.
    Returns:
        mask_mod. Its tiles are empty where frames are longer than a tile; in the order of
        frames it is a comb, and transposed to frame-last order a window.
    Raises:
        ModError: an argument is too small.
    Source: Xi et al. 2025 (Sparse VideoGen), arXiv:2502.01776 (temporal heads).
    """
    frame_size = read_size("temporal_head", "frame_size", frame_size, 1)
    window_tokens = read_size("temporal_head", "window_tokens", window_tokens)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx % frame_size - kv_idx % frame_size).abs() <= window_tokens

    return mask_mod
