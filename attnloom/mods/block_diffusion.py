"""Training of block diffusion: noisy blocks beside the clean text they continue."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import read_size


def block_diffusion(seq_len: int, block_size: int) -> MaskMod:
    """Noisy tokens first, then the same seq_len tokens clean.

    A noisy block sees itself and the clean blocks before it; a clean block sees itself and the
    clean blocks before it.

        noisy query, noisy key:   same block
        noisy query, clean key:   block of the query > block of the key
        clean query, clean key:   block of the query >= block of the key

    Args:
        seq_len: tokens of the text, 1 or more; query and key are 2 * seq_len long. It need not be
            a multiple of block_size.
        block_size: tokens of a block of the diffusion (not of the BlockMask), 1 or more.
    Returns:
        mask_mod.
    Raises:
        ModError: an argument is less than 1.
    Source: Arriola et al. 2025 (BD3-LM), arXiv:2503.09573 (the mask for training on noisy and
        clean text in one pass).
    """
    seq_len = read_size("block_diffusion", "seq_len", seq_len, 1)
    block_size = read_size("block_diffusion", "block_size", block_size, 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_clean, kv_clean = q_idx >= seq_len, kv_idx >= seq_len
        q_block = torch.where(q_clean, q_idx - seq_len, q_idx) // block_size
        kv_block = torch.where(kv_clean, kv_idx - seq_len, kv_idx) // block_size
        own = (q_block == kv_block) & (q_clean == kv_clean)
        return own | (kv_clean & (q_block > kv_block))

    return mask_mod
