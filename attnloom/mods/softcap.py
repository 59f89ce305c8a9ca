"""Soft-capping of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.mods.arguments import read_positive


def softcap(cap: float) -> ScoreMod:
    """Keep scores within -cap .. cap, smoothly.

        cap * tanh(score / cap)

    Args:
        cap: greater than 0; Gemma 2 takes 50 for attention, Grok-1 30.
    Returns:
        score_mod, differentiable in score.
    Raises:
        ModError: cap is not a number above 0.
    Source: Gemma Team 2024 (Gemma 2), arXiv:2408.00118, sec. 2.
    """
    cap = read_positive("softcap", "cap", cap)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
