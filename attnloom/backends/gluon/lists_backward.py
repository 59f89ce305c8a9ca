"""Live blocks as the kernels of the backward read them: of the transposed mask."""

from __future__ import annotations

from typing import Any

from attnloom.backends.gluon.configs_backward import KEYS
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.packed import pack_ints
from attnloom.backends.triton.transposed import transposed_lists

_NO_LISTS = (0.0,) * 12


def key_lists(call: AttentionCall) -> tuple[Any, ...]:
    """`lists` of backward_kernel and wide_kernel."""
    if call.blocks is None:
        return _NO_LISTS
    turned = transposed_lists(call.blocks)
    blocks = turned.blocks
    work = work_lists(blocks, KEYS)
    # a kernel needs an address, also to read nothing from
    entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
    num_key_blocks = pack_ints((blocks.grid.num_q_blocks,))
    return turned.offsets, entries, work.work, *work.steps, *num_key_blocks
