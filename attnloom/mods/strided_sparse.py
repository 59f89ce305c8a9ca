"""The strided pattern of sparse transformers."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def strided_sparse(stride: int) -> MaskMod:
    """Causal; the last stride tokens, and every stride-th one before.

        d = q_idx - kv_idx;  d >= 0 and (d <= stride or d % stride == 0)

    Args:
        stride: 1 or more; the paper takes about sqrt(S), for images the width of a row.
    Returns:
        mask_mod, both heads of the paper merged; separately they are sliding_window(stride) and
        dilated_window(S, stride).
    Raises:
        ModError: stride < 1.
    Source: Child et al. 2019, arXiv:1904.10509, sec. 4.3 (strided attention).
    """
    stride = read_size("strided_sparse", "stride", stride, 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance <= stride) | (distance % stride == 0))

    return mask_mod
