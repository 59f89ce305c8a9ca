"""From a mask_mod to block lists: trace, then classify."""

from __future__ import annotations

import torch

from attnloom.masking.classify import classify
from attnloom.masking.lists import BlockLists, TileGrid
from attnloom.masking.views import MaskMod
from attnloom.trace.tracer import trace_mask


def build_lists(
    mask_mod: MaskMod, grid: TileGrid, device: torch.device, separate_full: bool = True
) -> BlockLists:
    """Lists of the live tiles of a mask_mod; never allocates Q_LEN x KV_LEN.

    Raises:
        TraceError: mask_mod cannot be traced.
    """
    with torch.no_grad():
        return classify(trace_mask(mask_mod, device), grid, device, separate_full)
