"""Backwards of masks whose queries see few keys, as packed documents do.

Those that sweep over the keys of a head (backward_sweep.py), and those whose tiles of keys have so
few steps that a tile's beginning and end count: steps of 64 queries are left out, and results leave
while the next tile is computed. Decided by what the host knows. What a sweep saves, clearing and
rounding sums of dq, grows with the queries; what it costs, reading what it left itself, with the
key tiles that a query sees. How many scores smaller blocks keep is counted once a mask, for which
refined.py waits for the device. Measurements: docs/log.md, 2026-11-30.
"""

from __future__ import annotations

import torch

from attnloom.backends.gluon.configs_backward import KEYS, STEP
from attnloom.backends.gluon.fields import mask_target
from attnloom.backends.gluon.fields_forward import looked_up
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.refined import FEW_BLOCKS, has_few, refined
from attnloom.block_mask import BlockLists
from attnloom.masking.transforms import outside

# Keys of a query's live blocks, on average over queries: 12 documents have 224 at 2,048 tokens,
# where sweeping won, 320 at 4,096, where it won in the form for few keys and was not timed in the
# other, and 488 at 8,192, where it lost (H200).
_MOST_KEYS = 256
_MOST_KEYS_OF_FEW = 384
# Where queries see 4,160 arrivals by a lane of each warp gain 0.6% at D=128, and steps of 128
# queries 9% at D=64; in a window of 1,024 with blocks of 1,144 the former lose 0.8%, and the latter
# were not timed (H200).
_MANY_KEYS = 2048
_MOST_IDLE = 0.1  # of the time that all processors have for heads, a whole one at a time
_MOST_ROWS = 2**29  # a row of dq and two bits are one int32
_NARROW = 64  # columns, which were timed in another form alone
_WORTH = 0.98  # of the scores in given blocks, that those of a step may keep


def sweeps(call: AttentionCall) -> bool:
    """Whether programs take whole heads, and keep sums of dq to themselves."""
    blocks, query = call.blocks, call.query
    if blocks is None or call.mask is None or not _may(call):
        return False
    most = _MOST_KEYS_OF_FEW if sees_few(call) else _MOST_KEYS
    heads = query.size(0) * query.size(1)
    fits = heads * query.size(2) < _MOST_ROWS and _fills(heads, query.device)
    return fits and _has_at_most(most, blocks)


def sees_few(call: AttentionCall) -> bool:
    """Whether the forms are for a mask that were timed with packed documents alone."""
    blocks, wide = call.blocks, max(call.query.size(3), call.value.size(3)) > _NARROW
    if blocks is None or call.mask is None or call.score is not None or not wide or not _may(call):
        return False
    if not _has_at_most(FEW_BLOCKS * KEYS, blocks):
        return False
    return bool(looked_up(call.mask, mask_target(call, narrow=True)))


def sees_many(call: AttentionCall) -> bool:
    """Whether queries see so many keys that the forms of long causal rows are for them."""
    blocks = call.blocks
    return blocks is not None and _is_by_position(call) and not _has_at_most(_MANY_KEYS, blocks)


def sees_some(call: AttentionCall) -> bool:
    """Whether the form of windows is for them."""
    return call.blocks is not None and _is_by_position(call) and not sees_many(call)


def _is_by_position(call: AttentionCall) -> bool:
    return call.mask is not None and not call.mask.tensors


def finer(call: AttentionCall) -> AttentionCall:
    """The call with blocks of a step's queries, where they leave scores out."""
    blocks = call.blocks
    if blocks is None or not has_few(blocks, (STEP, KEYS)) or not sees_few(call):
        return call
    with outside():
        return refined(call, (STEP, KEYS), _WORTH)


def _may(call: AttentionCall) -> bool:
    """Whether blocks are a tile's keys, of one query head: otherwise several heads would add to
    what one program has."""
    blocks = call.blocks
    alone = call.query.shape[:2] == call.key.shape[:2]
    return blocks is not None and blocks.kv_block == KEYS and alone


def _has_at_most(keys: int, blocks: BlockLists) -> bool:
    """Of live blocks, on average over queries. Smaller blocks that keep fewer scores have fewer: a
    call that repeats does so with them too."""
    queries = blocks.num_batches * blocks.num_heads * blocks.q_len
    return 0 < blocks.entries.numel() * blocks.q_block * blocks.kv_block <= keys * queries


def _fills(num_heads: int, device: torch.device) -> bool:
    processors = configs.device_of(device).num_processors
    turns = -(-num_heads // processors) * processors
    return turns - num_heads <= _MOST_IDLE * turns
