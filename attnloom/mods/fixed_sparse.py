"""The fixed pattern of sparse transformers."""

from __future__ import annotations

from torch import Tensor

from attnloom.errors import ModError, counted
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def fixed_sparse(stride: int, num_summary: int) -> MaskMod:
    """Causal; the query's own block, and the last tokens of every block before.

        q_idx >= kv_idx and (q_idx // stride == kv_idx // stride
                             or kv_idx % stride >= stride - num_summary)

    Args:
        stride: tokens of a block, 1 or more; 128 or 256 in the paper.
        num_summary: tokens at the end of each block that all later ones see (the paper's c: 8, 16
            or 32), 0 to stride.
    Returns:
        mask_mod, both heads of the paper merged.
    Raises:
        ModError: stride < 1, or num_summary is not within 0 .. stride.
    Source: Child et al. 2019, arXiv:1904.10509, sec. 4.3 (fixed attention).
    """
    name = "fixed_sparse"
    stride = read_size(name, "stride", stride, 1)
    first = stride - read_size(name, "num_summary", num_summary)
    if first < 0:
        raise ModError(
            f"{name}: num_summary is {num_summary}, more than the {counted(stride, 'token')} of a "
            "block; it must be 0 to stride."
        )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = q_idx // stride == kv_idx // stride
        return (q_idx >= kv_idx) & (own | (kv_idx % stride >= first))

    return mask_mod
