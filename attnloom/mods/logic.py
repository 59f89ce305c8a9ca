"""Logic of mask_mods; and_masks and or_masks are in attnloom.api."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.masking.extent import limited, limits_of
from attnloom.masking.views import MaskMod
from attnloom.mods.mod_kinds import check_kinds


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """The mask_mod that keeps what mask_mod drops.

    Raises:
        ModError: it is not a mask_mod.
    """
    check_kinds("not_mask", (mask_mod,), "mask_mod")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~mask_mod(b, h, q_idx, kv_idx)

    return limited(mask, *limits_of(mask_mod))


def xor_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that keeps what an odd number of mask_mods keep; without any, nothing.

    Raises:
        ModError: one of them is not a mask_mod.
    """
    check_kinds("xor_masks", mask_mods, "mask_mod")

    def xor_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kept = torch.zeros_like(b, dtype=torch.bool)
        for mask_mod in mask_mods:
            kept = kept ^ mask_mod(b, h, q_idx, kv_idx)
        return kept

    return limited(xor_mask, *limits_of(*mask_mods))
