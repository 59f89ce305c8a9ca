"""A call over a cache as calls of one sequence each, with keys and values in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.paged.table import PageTable


def sequences(
    call: AttentionCall,
) -> Iterator[tuple[AttentionCall, tuple[int, int], tuple[int, int]]]:
    """(call of one sequence, where its rows are: (batch entry b, row of its first query), (what b
    is counted from, position of that query)); rows that stand before their sequence are left out,
    and sequences without tokens or queries."""
    table, limit = call.table, call.kv_len
    assert table is not None
    for b, (length, count) in enumerate(zip(*table.on_host(call.query.size(2)), strict=True)):
        length = min(length, limit)
        if length <= 0 or count <= 0:
            continue
        before = max(0, count - length)
        one = replace(
            call,
            query=call.query[b : b + 1, :, before:count],
            key=_gather(call.key, table, b, length),
            value=_gather(call.value, table, b, length),
            blocks=None if call.blocks is None else _of_batch(call.blocks, b),
            table=None,
        )
        yield one, (b, before), (b, length - count + before)


def _gather(storage: torch.Tensor, table: PageTable, b: int, length: int) -> torch.Tensor:
    """[1, Hkv, length, D]"""
    if table.pages is None:
        b = 0 if storage.size(0) == 1 else b
        return storage[b : b + 1, :, :length]
    pages = table.pages[b, : -(-length // table.page_size)]
    rows = storage[pages.long()].transpose(0, 1)  # [Hkv, pages, page_size, D]
    return rows.flatten(1, 2)[None, :, :length]


def _of_batch(blocks: BlockLists, b: int) -> BlockLists:
    """The lists of one batch entry."""
    if blocks.num_batches == 1:
        return blocks
    rows = blocks.num_heads * blocks.grid.num_q_blocks
    return replace(
        blocks, row_offsets=blocks.row_offsets[b * rows : (b + 1) * rows + 1], num_batches=1
    )
