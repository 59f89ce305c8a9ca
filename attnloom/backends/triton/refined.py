"""Smaller blocks, for masks whose rows have few.

Where a row of blocks holds a handful of live ones, many are partial, and many scores in those are
masked: of the 128 x 128 blocks of twelve documents, blocks of 64 x 64 keep 71% at 2,048 tokens and
85% at 8,192. The kernels of the backward lose little with tiles of 64 (docs/log.md), and so do
programs of gluon/short_rows.py; any other forward computes the given blocks, since a tile of 128
rows shares its keys. The Hopper backward asks for blocks of 64 x 128 (gluon/few_keys.py).
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.lists import is_capturing
from attnloom.block_mask import BlockLists
from attnloom.ir.node import BoundProgram
from attnloom.masking.refine import refine, tells_apart

SIDES = (64, 64)  # queries and keys
# Live blocks a row at most, on average, and blocks in all (each is evaluated once).
FEW_BLOCKS = 6
_MOST_BLOCKS = 1 << 14
# Of the scores in the given blocks, as many as a refinement may keep to be worth it.
WORTH = 0.9

# None where the given blocks stay: an entry must not hold the lists that end it.
_cache: dict[tuple[object, ...], BlockLists | None] = {}


def refined(
    call: AttentionCall, sides: tuple[int, int] = SIDES, worth: float = WORTH
) -> AttentionCall:
    """The call with blocks of these sides where they keep no more than `worth` of the scores in the
    given ones; computed once a mask."""
    blocks, mask = call.blocks, call.mask
    if blocks is None or mask is None or not call.query.is_cuda or not has_few(blocks, sides):
        return call
    if may_change(call):
        return call
    key = (
        sides,
        id(blocks.row_offsets),
        id(blocks.entries),
        blocks.q_len,
        blocks.kv_len,
        blocks.q_offset,
        blocks.kv_offset,
        mask.program.digest,
        mask.numbers,
        *[(id(t), t._version) for t in mask.tensors],
    )
    if key not in _cache:
        _cache[key] = worth_refining(mask, blocks, sides, worth)
        for tensor in (blocks.row_offsets, blocks.entries, *mask.tensors):
            weakref.finalize(tensor, _cache.pop, key, None)
    found = _cache[key]
    return call if found is None else replace(call, blocks=found)


def may_change(call: AttentionCall) -> bool:
    """Whether the mask_mod's tensors, from which smaller blocks follow, may hold something else
    when the blocks are used: when a graph is replayed, and where writes are not counted."""
    tensors = () if call.mask is None else call.mask.tensors
    return is_capturing(call.query) or any(t.is_inference() for t in tensors)


def has_few(blocks: BlockLists, sides: tuple[int, int] = SIDES) -> bool:
    """Whether smaller blocks may be worth it, by what the host knows."""
    rows, live = blocks.row_offsets.numel() - 1, blocks.entries.numel()
    given = blocks.q_block, blocks.kv_block
    smaller = given != sides and all(g >= side for g, side in zip(given, sides, strict=True))
    return smaller and 0 < live <= min(FEW_BLOCKS * rows, _MOST_BLOCKS)


def worth_refining(
    mask: BoundProgram,
    blocks: BlockLists,
    sides: tuple[int, int] = SIDES,
    most: float = WORTH,
) -> BlockLists | None:
    """Blocks of sides, if they leave out enough. Waits for the device."""
    if not tells_apart(mask, blocks):
        return None
    with torch.no_grad():
        found = refine(mask, blocks, sides)
    scores = blocks.entries.numel() * blocks.q_block * blocks.kv_block
    worth = 0 < found.entries.numel() * sides[0] * sides[1] <= most * scores
    return found if worth else None
