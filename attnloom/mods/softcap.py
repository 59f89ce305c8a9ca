"""Soft-capping of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.mods.arguments import read_factor


def softcap(cap: float | Tensor) -> ScoreMod:
    """Keep scores within -cap .. cap, smoothly.

        cap * tanh(score / cap)

    Args:
        cap: greater than 0; Gemma 2 takes 50 for attention, Grok-1 30. A tensor of one element is
            captured, and gets its gradient.
    Returns:
        score_mod, differentiable in score and cap.
    Raises:
        ModError: cap is not a finite number above 0.
    Source: Gemma Team 2024 (Gemma 2), arXiv:2408.00118, sec. 2.
    """
    limit = read_factor("softcap", "cap", cap, positive=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return score_mod
