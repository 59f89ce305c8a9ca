"""Attention with linear biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.masking.extent import limited
from attnloom.mods.arguments import read_size
from attnloom.mods.extent import of_heads


def alibi(
    num_heads: int, *, symmetric: bool = False, device: torch.device | str | None = None
) -> ScoreMod:
    """Penalise distance linearly, one slope per head (ALiBi).

        score + slope[h] * (kv_idx - q_idx)
        score - slope[h] * |q_idx - kv_idx|        symmetric

    Args:
        num_heads: query heads Hq, 1 or more; need not be a power of two.
        symmetric: penalise later keys as well, for attention that is not causal.
        device: of the slopes; default: torch's.
    Returns:
        score_mod capturing slopes [Hq] float32; differentiable in score, slopes are constant.
    Raises:
        ModError: num_heads < 1.
    Source: Press et al. 2022, arXiv:2108.12409, sec. 3; other head counts as in the authors' code.
    """
    slopes = torch.tensor(
        alibi_slopes(read_size("alibi", "num_heads", num_heads, 1)),
        dtype=torch.float32,
        device=device,
    )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = kv_idx - q_idx
        return score + slopes[h] * (-distance.abs() if symmetric else distance)

    return limited(score_mod, *of_heads("alibi", "num_heads", num_heads))


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8i/n) for n heads; beyond a power of two n, every second slope of 2n heads."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * whole)) for i in range(0, 2 * whole, 2)]
    return slopes + between[: num_heads - whole]
