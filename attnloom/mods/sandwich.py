"""Sandwich: the inner product of sinusoidal embeddings as a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.errors import ModError
from attnloom.masking.extent import limited
from attnloom.mods.arguments import read_size
from attnloom.mods.extent import of_heads


def sandwich(
    num_heads: int,
    max_distance: int,
    dim: int = 128,
    *,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """A bias that falls logarithmically with distance, compressed by head.

        score + (sum - dim / 2) / (8 * (h + 1) / Hq)
        sum = cos(d / 10000^(2 i / dim)) over i = 1 .. dim / 2,  d = |q_idx - kv_idx|

    Args:
        num_heads: query heads Hq, 1 or more.
        max_distance: longest distance with a value of its own, 0 or more; the sequence's length
            less 1. Further keys share it.
        dim: features of the sinusoidal embedding, even; the paper's d bar of 128.
        device: of the tables; default: torch's.
    Returns:
        score_mod capturing the sum for each distance and the factor of each head, float32;
        differentiable in score.
    Raises:
        ModError: an argument is too small, or dim is odd.
    Source: Chi et al. 2023, arXiv:2212.10356; the factor of each head as in NVIDIA NeMo.
    """
    heads = read_size("sandwich", "num_heads", num_heads, 1)
    far = read_size("sandwich", "max_distance", max_distance)
    half, odd = divmod(read_size("sandwich", "dim", dim, 2), 2)
    if odd:
        raise ModError(f"sandwich: dim is {dim}; it must be even, a sine and a cosine a frequency.")
    distance = torch.arange(far + 1, dtype=torch.float64)
    total = torch.zeros_like(distance)
    for i in range(1, half + 1):
        total += torch.cos(distance / 10000.0 ** (2 * i / dim))
    place = torch.arange(1, heads + 1, dtype=torch.float64)
    fall = (total - half).to(device=device, dtype=torch.float32)
    ratio = (heads / (8 * place)).to(device=device, dtype=torch.float32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + ratio[h] * fall[(q_idx - kv_idx).abs().clamp(max=far)]

    return limited(score_mod, *of_heads("sandwich", "num_heads", heads))
