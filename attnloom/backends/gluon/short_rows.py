"""Masks whose rows of blocks hold few, as packed documents: smaller tiles in the forward.

Tiles of 64 queries and 64 keys, of programs with one consumer two of which share a processor, take
blocks that leave out more of the scores (backends/triton/refined.py). The choice rests on numbers
that the host has: how many blocks and rows of blocks there are, and whether the mask_mod looks up
its keys, which packed documents do and causal masks and windows do not; and, once a mask, on how
many scores smaller blocks keep, for which refined.py waits for the device, for the gradients as
well. Left out is what nobody has timed so: score_mods that look at positions other than linearly,
and those of masks by position.
"""

from __future__ import annotations

from attnloom.backends.gluon.configs_forward import forms_of_short_rows, widest_of
from attnloom.backends.gluon.fields import mask_target
from attnloom.backends.gluon.fields_forward import looked_up
from attnloom.backends.gluon.score_form import sees_score_alone
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.refined import FEW_BLOCKS, SIDES, has_few, refined
from attnloom.block_mask import BlockLists
from attnloom.masking.transforms import outside

# Live blocks of 128 keys a row of a mask by position, on average at most, by heads as covered.
# D=128, H200: a window of 256, of three, 0.249 ms -> 0.220; of 512, of five, 0.324 -> 0.327.
_FEW_BY_POSITION = {128: 3}


def finer(call: AttentionCall) -> AttentionCall:
    """The call with blocks of SIDES where its forward is faster with them."""
    blocks = call.blocks
    if blocks is None or not has_few(blocks) or not _holds_few(call, blocks, 1):
        return call
    with outside():
        found = refined(call)
    return found if has_short_rows(found) else call


def has_short_rows(call: AttentionCall) -> bool:
    """Whether the blocks of a call are of SIDES, and so few that the same forms are for it."""
    blocks = call.blocks
    if blocks is None or (blocks.q_block, blocks.kv_block) != SIDES:
        return False
    return _holds_few(call, blocks, 2)  # of 64 keys where FEW_BLOCKS counts blocks of 128


def _holds_few(call: AttentionCall, blocks: BlockLists, factor: int) -> bool:
    """Whether rows hold so few blocks as the call's forms are for. factor: blocks in 128 keys."""
    rows, live = blocks.row_offsets.numel() - 1, blocks.entries.numel()
    return live <= factor * _few(call) * rows


def _few(call: AttentionCall) -> int:
    """Live blocks a row on average that are few for this call; none: -1."""
    dims = call.query.size(3), call.value.size(3)
    if call.mask is None or not forms_of_short_rows(*dims):
        return -1
    if not sees_score_alone(call.score, call.options.exact_math):
        return -1
    if looked_up(call.mask, mask_target(call, narrow=True)):
        return FEW_BLOCKS
    by_position = call.score is None and not call.mask.tensors
    return _FEW_BY_POSITION.get(widest_of(*dims), -1) if by_position else -1
