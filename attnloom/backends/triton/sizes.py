"""What sizes of a call decide, whichever kernels run it: a module without kernels, so that asking
imports none."""

from __future__ import annotations

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs

MAX_DECODE_ROWS = 64  # query heads of a group times queries that count as decode
_MAX_DECODE_ROWS_IDLE = 128  # the same where a forward would leave processors idle


def is_decode(call: AttentionCall) -> bool:
    """Whether queries are so few that programs must share their keys to fill the device, and the
    rows of blocks of those that share a program may be united (lists.group_lists), which leaves it
    to the mask_mod to tell them apart."""
    batch, heads, q_len, _ = call.query.shape
    blocks, group = call.blocks, heads // call.key.size(1)
    if blocks is not None and blocks.chosen:
        one_row = q_len <= blocks.q_block and (blocks.num_heads == 1 or group == 1)
        if not one_row:
            return False
    num_rows = group * q_len
    if num_rows <= MAX_DECODE_ROWS or num_rows > _MAX_DECODE_ROWS_IDLE:
        return num_rows <= MAX_DECODE_ROWS
    return batch * heads < configs.device_of(call.query.device).num_processors


def heads_together(call: AttentionCall, device: configs.Device) -> int:
    """Query heads taken together, whole groups of a key head: a power of two of key heads whose
    keys and values share about a third of the L2 cache (H200, S = 8192: 4 heads at D = 128, 8 at
    64)."""
    key, value = call.key, call.value
    group = call.query.size(1) // key.size(1)
    bytes_a_head = key.size(2) * (
        key.size(3) * key.element_size() + value.size(3) * value.element_size()
    )
    together = max(1, 3 * device.l2_bytes // 10 // max(bytes_a_head, 1))
    return min(1 << (together.bit_length() - 1), 64) * group
