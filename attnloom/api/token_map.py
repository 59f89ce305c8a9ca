"""Scores of a chunk of query rows as dense tensors: their positions, and which of them are live."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.ir.interpret import interpret

# Scores of one chunk over all batch entries and heads: 64 MiB of float32.
MAX_SCORES = 1 << 24


def row_chunks(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) query ranges whose scores stay below MAX_SCORES."""
    rows = query.size(2)
    a_row = max(1, query.size(0) * query.size(1) * key.size(2))
    step = max(1, MAX_SCORES // a_row)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def positions(query: torch.Tensor, keys: int, start: int) -> dict[str, torch.Tensor]:
    """b [B,1,1,1], h [1,Hq,1,1], q [1,1,rows,1], kv [1,1,1,KV_LEN]."""
    batch, heads, rows, _ = query.shape
    ranges = {"b": (0, batch), "h": (0, heads), "q": (start, start + rows), "kv": (0, keys)}
    out = {}
    for axis, (name, (lo, hi)) in enumerate(ranges.items()):
        shape = [1, 1, 1, 1]
        shape[axis] = hi - lo
        out[name] = torch.arange(lo, hi, device=query.device).view(shape)
    return out


def live_scores(call: AttentionCall, at: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Which scores take part, broadcastable to [B, Hq, rows, KV_LEN]; None for all of them."""
    blocks = call.blocks
    if blocks is None:
        return None
    partial, full = tile_tokens(blocks, at)
    if call.mask is None:
        return partial | full
    shifted = {**at, "q": at["q"] + blocks.q_offset, "kv": at["kv"] + blocks.kv_offset}
    return full | (partial & interpret(call.mask, shifted)[0])


def tile_tokens(
    blocks: BlockLists, at: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores inside partial and inside full tiles: [Bm, Hm, rows, KV_LEN] bool each."""
    q_idx, kv_idx = at["q"].flatten(), at["kv"].flatten()
    num_rows = -(-blocks.q_len // blocks.q_block)
    columns = -(-blocks.kv_len // blocks.kv_block)
    if q_idx.numel() == 0 or columns == 0:
        shape = (blocks.num_batches, blocks.num_heads, q_idx.numel(), kv_idx.numel())
        none = q_idx.new_zeros(shape, dtype=torch.bool)
        return none, none
    first = int(q_idx[0]) // blocks.q_block
    last = int(q_idx[-1]) // blocks.q_block + 1
    groups = torch.arange(blocks.num_batches * blocks.num_heads, device=q_idx.device)
    tile_rows = torch.arange(first, last, device=q_idx.device)
    wanted = (groups[:, None] * num_rows + tile_rows).flatten()  # rows of the ragged lists
    begin, end = blocks.row_offsets[wanted], blocks.row_offsets[wanted + 1]
    counts = end - begin
    owner = torch.repeat_interleave(torch.arange(wanted.numel(), device=q_idx.device), counts)
    within = torch.arange(owner.numel(), device=q_idx.device) - (counts.cumsum(0) - counts)[owner]
    entries = blocks.entries[begin[owner] + within].long()
    kinds = torch.zeros(wanted.numel(), columns, dtype=torch.int8, device=q_idx.device)
    kinds[owner, entries >> 1] = (2 - (entries & 1)).to(torch.int8)  # 1 partial, 2 full
    kinds = kinds.view(blocks.num_batches, blocks.num_heads, last - first, columns)
    kinds = kinds[:, :, q_idx // blocks.q_block - first][:, :, :, kv_idx // blocks.kv_block]
    return kinds == 1, kinds == 2
