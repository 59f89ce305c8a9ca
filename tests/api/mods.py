"""The few mods that the API tests share, so that few kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch

Mod = Callable[..., torch.Tensor]


def causal(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor):
    return q_idx >= kv_idx


def late_start(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor):
    """Queries 0 to 2 see nothing."""
    return (q_idx >= 3) & (q_idx >= kv_idx)


def slope_bias(slope: torch.Tensor) -> Mod:
    """score + slope[h] * (kv_idx - q_idx); differentiable in slope [Hq]."""

    def mod(score, b, h, q_idx, kv_idx):
        return score + slope[h] * (kv_idx - q_idx)

    return mod


def soft_cap(cap: float) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return mod


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    lengths: tuple[int, int] = (5, 7),
    head_dim: int = 4,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((heads, lengths[0]), (key_heads, lengths[1]), (key_heads, lengths[1]))
    tensors = (
        normal(batch, h, length, head_dim, seed=i, dtype=dtype)
        for i, (h, length) in enumerate(shapes)
    )
    q, k, v = (t.requires_grad_(requires_grad) for t in tensors)
    return q, k, v
