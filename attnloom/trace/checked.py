"""mask_mods that are no factories: they check how they are called, then call another function.

To whatever looks at mods they are that function: it has their signature, and it is what a trace
depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType

import torch

from attnloom.errors import ModError, counted


def passed_as_it_is(mask_mod: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mask_mod that is no factory, and says so where it is called like one."""
    name = mask_mod.__name__

    @functools.wraps(mask_mod)
    def checked(*positions: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        count = len(positions) + len(named)
        if count != 4:
            raise ModError(
                f"{name} was called with {counted(count, 'argument')}; it makes no mask_mod, it is "
                f"one: {name}(b, h, q_idx, kv_idx). Pass it as it is, as in "
                f"create_block_mask({name}, B, H, Q_LEN, KV_LEN)."
            )
        return mask_mod(*positions, **named)

    return checked


# All of them share their code.
_CODE = passed_as_it_is(lambda: None).__code__  # type: ignore[attr-defined]


def unwrapped(function: FunctionType) -> FunctionType:
    """What such a mask_mod calls; other functions themselves."""
    return function.__wrapped__ if function.__code__ is _CODE else function  # type: ignore
