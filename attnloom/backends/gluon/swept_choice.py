"""Which backwards sweep over the keys of a head (backward_sweep.py).

Decided by what the host knows, without waiting for the device. What a sweep saves, clearing and
rounding sums of dq, grows with the queries; what it costs, reading what it left itself, with the
key tiles that a query sees. Measurements: docs/log.md, 2026-11-30.
"""

from __future__ import annotations

import torch

from attnloom.backends.gluon.configs_backward import KEYS
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs

# Keys of a query's live blocks, on average over queries: 12 documents have 224 at 2,048 tokens,
# where sweeping won, and 488 at 8,192, where it lost (H200, D=64 and 128).
_MOST_KEYS = 256
_MOST_IDLE = 0.1  # of the time that all processors have for heads, a whole one at a time
_MOST_ROWS = 2**29  # a row of dq and two bits are one int32


def sweeps(call: AttentionCall) -> bool:
    """Whether programs take whole heads, and keep sums of dq to themselves."""
    blocks, query, key = call.blocks, call.query, call.key
    if blocks is None or call.mask is None or blocks.kv_block != KEYS:
        return False
    if query.shape[:2] != key.shape[:2]:
        return False  # several heads would add to what one program has
    rows = blocks.row_offsets.numel() - 1
    few = 0 < blocks.entries.numel() * KEYS <= _MOST_KEYS * rows
    heads = query.size(0) * query.size(1)
    return few and heads * query.size(2) < _MOST_ROWS and _fills(heads, query.device)


def _fills(num_heads: int, device: torch.device) -> bool:
    processors = configs.device_of(device).num_processors
    turns = -(-num_heads // processors) * processors
    return turns - num_heads <= _MOST_IDLE * turns
