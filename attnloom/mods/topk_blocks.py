"""Blocks of keys that each block of queries chooses by a score."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import Integers, check_floats, read_integers, read_size
from attnloom.mods.block_table import block_table_mod


def topk_blocks(block_scores: Tensor, k: int, block_size: int) -> MaskMod:
    """Each block of queries sees the k blocks of keys that score highest.

    The choice is made on the device of the scores, without waiting for it.

    Args:
        block_scores: [B, H, q_blocks, kv_blocks], [H, ...] or [q_blocks, kv_blocks], floating
            point. What scores -inf (the future, for causal attention) or NaN is never chosen, what
            scores inf always (the query's own block), up to k.
        k: blocks of keys, 1 or more; all if there are fewer.
        block_size: tokens of a block, 1 or more. For causal attention join with causal_mask.
    Returns:
        mask_mod capturing a table of blocks, bool. No gradient flows to block_scores.
    Raises:
        ModError: k or block_size < 1, or block_scores are not floating point.
        ShapeError: block_scores have another number of dimensions.
    Source: Lu et al. 2025 (MoBA), arXiv:2502.13189; Yuan et al. 2025 (NSA),
        arXiv:2502.11089.
    """
    name = "topk_blocks"
    check_floats(name, "block_scores", block_scores, 2, 3, 4)
    block_size = read_size(name, "block_size", block_size, 1)
    scores = block_scores.detach()
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    count = min(read_size(name, "k", k, 1), scores.shape[-1])
    best = scores.topk(count, dim=-1)
    live = torch.zeros_like(scores, dtype=torch.bool)
    live.scatter_(-1, best.indices, best.values > -torch.inf)
    return block_table_mod(name, live, block_size)


def selected_blocks(indices: Integers, kv_len: int, block_size: int) -> MaskMod:
    """Each block of queries sees the blocks of keys that it is given.

    Args:
        indices: [B, H, q_blocks, k], [H, ...] or [q_blocks, k] integers, in any order; negative
            for none.
        kv_len: tokens of the key, 0 or more.
        block_size: tokens of a block, 1 or more.
    Returns:
        mask_mod capturing a table of blocks, bool. Indices of blocks beyond kv_len are left out.
    Raises:
        ModError: a size is too small. DtypeError, ShapeError: indices are not integers of 2 to 4
            dimensions.
    Source: as `topk_blocks`.
    """
    name = "selected_blocks"
    chosen = read_integers(name, "indices", indices, 2, 3, 4).long()
    block_size = read_size(name, "block_size", block_size, 1)
    num_blocks = max(1, -(-read_size(name, "kv_len", kv_len) // block_size))
    # One more column takes what is not a block, and is cut off.
    outside = (chosen < 0) | (chosen >= num_blocks)
    live = torch.zeros((*chosen.shape[:-1], num_blocks + 1), dtype=torch.bool, device=chosen.device)
    live.scatter_(-1, chosen.masked_fill(outside, num_blocks), True)
    return block_table_mod(name, live[..., :num_blocks], block_size)
