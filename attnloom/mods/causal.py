"""Causal masks."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size
from attnloom.trace.checked import passed_as_it_is


@passed_as_it_is
def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Each token sees itself and what comes before it. A mask_mod, not a factory.

        q_idx >= kv_idx

    Source: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.3.
    """
    return q_idx >= kv_idx


def causal_lower_right(q_len: int, kv_len: int) -> MaskMod:
    """Causal with a cache: the last query sees the last key.

        q_idx + kv_len - q_len >= kv_idx

    Args:
        q_len, kv_len: lengths of query and key, 0 or more.
    Returns:
        mask_mod. Where q_len > kv_len the first q_len - kv_len queries see nothing.
    Raises:
        ModError: a length is negative.
    Source: torch.nn.attention.bias.causal_lower_right; FlashAttention's alignment since 2.1.
    """
    name = "causal_lower_right"
    offset = read_size(name, "kv_len", kv_len) - read_size(name, "q_len", q_len)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return mask_mod
