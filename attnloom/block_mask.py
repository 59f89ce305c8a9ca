"""BlockMask: which tiles of the score matrix are empty, partial or full.

Placeholder for the contract of BlockLists; the class BlockMask is added beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Ragged lists of live tiles, as kernels read them.

    Row r = (b * num_heads + h) * num_q_blocks + q_block, where b or h is 0 when the mask has one
    batch entry or one head. Lists are in ascending key order.

    row_offsets: [rows + 1] int64; entries of row r are row_offsets[r] .. row_offsets[r + 1].
    entries: [total] int32; kv_block * 2 + 1 for a partial tile, kv_block * 2 for a full one.
    num_batches, num_heads: of the mask: 1 means broadcast.
    q_block, kv_block: tile sizes in tokens. q_len, kv_len: lengths in tokens.
    q_offset, kv_offset: added to a position before the mask_mod (and only it) sees it.
    """

    row_offsets: torch.Tensor
    entries: torch.Tensor
    num_batches: int
    num_heads: int
    q_block: int
    kv_block: int
    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_offset: int = 0
