"""Masks that a table of blocks gives, one flag for each block of queries and block of keys."""

from __future__ import annotations

from torch import Tensor

from attnloom.masking.views import MaskMod
from attnloom.trace.names import known_as


def block_table_mod(factory: str, live: Tensor, block_size: int) -> MaskMod:
    """The mask_mod of a table [q_blocks, kv_blocks], [H, ...] or [B, H, ...] bool; leading sizes of
    1 broadcast.

    Tiles of a BlockMask that lie inside a block are decided by one element of the table.
    """
    batched = live.dim() == 4 and live.shape[0] > 1
    if live.dim() == 4 and not batched:
        live = live[0]
    headed = live.dim() > 2 and live.shape[-3] > 1
    if live.dim() > 2 and not headed:
        live = live.select(-3, 0)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        leading = ((b,) if batched else ()) + ((h,) if headed else ())
        return live[(*leading, q_idx // block_size, kv_idx // block_size)]

    return known_as(mask_mod, factory)
