"""The table of mods that the tracer is tested on, as users write them.

Each entry makes a score_mod or a mask_mod with new captures, for B 2, H 2, Q_LEN 5, KV_LEN 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

B, H, Q_LEN, KV_LEN = 2, 2, 5, 6
Mod = Callable[..., Any]
SCORE_MODS: dict[str, Callable[[], Mod]] = {}
MASK_MODS: dict[str, Callable[[], Mod]] = {}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values from a generator of its own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*shape: int, high: int, seed: int = 0) -> torch.Tensor:
    """Integers from 0 to high - 1."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def score(make: Callable[[], Mod]) -> Callable[[], Mod]:
    """Enter a factory of score_mods."""
    SCORE_MODS[make.__name__] = make
    return make


def mask(make: Callable[[], Mod]) -> Callable[[], Mod]:
    """Enter a factory of mask_mods."""
    MASK_MODS[make.__name__] = make
    return make
