"""Mods of a part of a mask: positions of the part are mapped to positions of the whole.

They are functools.partial of functions at module level, so that they pickle by name and a new
offset is a new number, not a new structure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from attnloom.trace.checked import passed_as_it_is

MaskMod = Callable[..., torch.Tensor]
Pick = Callable[[torch.Tensor], torch.Tensor]


def shift_mod(mod: MaskMod, q_offset: int, kv_offset: int = 0) -> MaskMod:
    """The mod at (q_idx + q_offset, kv_idx + kv_offset); shifts of shifts add up."""
    if isinstance(mod, functools.partial) and mod.func is shifted_mask:
        mod, inner_q, inner_kv = mod.args
        q_offset, kv_offset = q_offset + inner_q, kv_offset + inner_kv
    if not q_offset and not kv_offset:
        return mod
    return functools.partial(shifted_mask, mod, q_offset, kv_offset)


def query_shift(mod: MaskMod) -> int:
    """How far `shift_mod` moved the queries of a mod; 0 if it did not."""
    if isinstance(mod, functools.partial) and mod.func is shifted_mask:
        return mod.args[1]
    return 0


def pick_mod(mod: MaskMod, batch: Pick | None, head: Pick | None, query: Pick | None) -> MaskMod:
    """The mod at mapped batch entries, heads and query positions; None maps to itself."""
    if batch is None and head is None and query is None:
        return mod
    return functools.partial(picked_mask, mod, batch, head, query)


def shift_entries(mod: MaskMod, first_batch: int, first_head: int) -> MaskMod:
    """The mod at (b + first_batch, h + first_head)."""
    batch, head = (
        functools.partial(pick_shifted, first) if first else None
        for first in (first_batch, first_head)
    )
    return pick_mod(mod, batch, head, None)


def pick_index(chosen: torch.Tensor) -> Pick | None:
    """Position i of a part -> chosen[i] ([n] int64). One choice answers every position, so that a
    mask of one batch entry still broadcasts."""
    values = chosen.tolist()
    if not values:
        return None
    first = values[0]
    if len(values) == 1:
        return functools.partial(pick_one, first)
    if values == list(range(first, first + len(values))):
        return functools.partial(pick_shifted, first) if first else None
    return functools.partial(pick_from, chosen)


def pick_blocks(chosen: torch.Tensor, block: int) -> Pick:
    """Query position in the chosen blocks, laid side by side -> position in the whole."""
    return functools.partial(pick_from_blocks, chosen, block)


def shifted_mask(
    mod: MaskMod,
    q_offset: int,
    kv_offset: int,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """The mod, seen from a window that begins at (q_offset, kv_offset)."""
    return mod(b, h, q_idx + q_offset, kv_idx + kv_offset)


def picked_mask(
    mod: MaskMod,
    batch: Pick | None,
    head: Pick | None,
    query: Pick | None,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """The mod, with batch entry, head and query position mapped first."""
    return mod(
        b if batch is None else batch(b),
        h if head is None else head(h),
        q_idx if query is None else query(q_idx),
        kv_idx,
    )


def pick_one(value: int, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(index) + value


def pick_shifted(value: int, index: torch.Tensor) -> torch.Tensor:
    return index + value


def pick_from(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]


def pick_from_blocks(table: torch.Tensor, block: int, index: torch.Tensor) -> torch.Tensor:
    return table[index // block] * block + index % block


@passed_as_it_is
def noop_mask(
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """A mask_mod that keeps every score."""
    return torch.ones_like(b, dtype=torch.bool)
