"""Sizes of a problem and the generator its tensors are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """B, Hq, Hkv, Q_LEN, KV_LEN, D, Dv of one attention problem."""

    B: int = 2
    Hq: int = 2
    Hkv: int = 2
    Q_LEN: int = 96
    KV_LEN: int = 96
    D: int = 16
    Dv: int = 16

    @property
    def reach(self) -> int:
        """Largest distance between a query and a key position."""
        return max(self.Q_LEN, self.KV_LEN, 1)


class Draw:
    """Seeded source of captured tensors.

    dtype: that of learnable captures: float64 for float64 inputs, else float32, as in training
        with half-precision activations.
    """

    def __init__(self, seed: int, inputs_dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float64 if inputs_dtype == torch.float64 else torch.float32

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return values.to(dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return (low + (high - low) * values).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype=torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def flags(self, density: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator) < density

    def documents(self, length: int, count: int) -> torch.Tensor:
        """[length] int32 ids of `count` packed documents of uneven lengths."""
        ids = torch.randint(0, count, (length,), generator=self._generator)
        return ids.sort().values.to(torch.int32)
