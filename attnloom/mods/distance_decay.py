"""Exponential decay with distance."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.masking.extent import limited
from attnloom.mods.arguments import read_size
from attnloom.mods.extent import of_heads


def distance_decay(num_heads: int, *, device: torch.device | str | None = None) -> ScoreMod:
    """Weights fall by a factor a token, one factor per head, as in RetNet.

        score + |q_idx - kv_idx| * log(gamma[h]),  gamma[h] = 1 - 2^(-5 - h)

    Under the softmax an added logarithm multiplies the weight: exp(score) becomes
    gamma^distance * exp(score). RetNet itself multiplies scores and takes no softmax.

    Args:
        num_heads: query heads Hq, 1 or more.
        device: of the table; default: torch's.
    Returns:
        score_mod capturing log(gamma) [Hq] float32; differentiable in score.
    Raises:
        ModError: num_heads < 1.
    Source: Sun et al. 2023 (RetNet), arXiv:2307.08621, sec. 2.2 (gamma of each head).
    """
    heads = read_size("distance_decay", "num_heads", num_heads, 1)
    gamma = -torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64))
    rate = torch.log1p(gamma).to(device=device, dtype=torch.float32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + rate[h] * (q_idx - kv_idx).abs()

    return limited(score_mod, *of_heads("distance_decay", "num_heads", heads))
