"""Masks whose rows of blocks hold few, as packed documents: smaller tiles in the forward.

Tiles of 64 queries and 64 keys, of programs with one consumer two of which share a processor, take
blocks that leave out more of the scores (backends/triton/refined.py). The choice rests on numbers
that the host has: how many blocks and rows of blocks there are, and that the mask_mod looks up its
keys, which packed documents do and causal masks, windows and prefixes do not; and, once a mask, on
how many scores smaller blocks keep, for which refined.py waits for the device, for the gradients as
well. Masks by position and score_mods are left out because nobody has timed them so.
"""

from __future__ import annotations

from attnloom.backends.gluon.configs_forward import forms_of_short_rows
from attnloom.backends.gluon.fields import mask_target
from attnloom.backends.gluon.fields_forward import looked_up
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.lists import is_capturing
from attnloom.backends.triton.refined import FEW_BLOCKS, SIDES, has_few, refined
from attnloom.masking.transforms import outside


def finer(call: AttentionCall) -> AttentionCall:
    """The call with blocks of SIDES where its forward is faster with them."""
    blocks = call.blocks
    if blocks is None or not has_few(blocks) or not _may(call):
        return call
    assert call.mask is not None
    # Smaller blocks follow from what the tensors of the mask_mod hold. When a graph is replayed it
    # may be something else, and writes to an inference tensor are not counted.
    if is_capturing(call.query) or any(t.is_inference() for t in call.mask.tensors):
        return call
    with outside():
        return refined(call)


def has_short_rows(call: AttentionCall) -> bool:
    """Whether the blocks of a call are of SIDES, and so few that the same forms are for it."""
    blocks = call.blocks
    if blocks is None or (blocks.q_block, blocks.kv_block) != SIDES:
        return False
    rows, live = blocks.row_offsets.numel() - 1, blocks.entries.numel()
    # of 64 keys where FEW_BLOCKS counts blocks of 128
    return live <= 2 * FEW_BLOCKS * rows and _may(call)


def _may(call: AttentionCall) -> bool:
    dims = call.query.size(3), call.value.size(3)
    if call.score is not None or call.mask is None or not forms_of_short_rows(*dims):
        return False
    return bool(looked_up(call.mask, mask_target(call, narrow=True)))
