"""Scores of a chunk of query rows as dense tensors: their positions, and which of them are live."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.ir.interpret import interpret

# Scores of one chunk over all batch entries and heads: 4 MiB of float32, of which a second
# derivative keeps up to seventy at a time.
MAX_SCORES = 1 << 20


def row_chunks(query: torch.Tensor, keys: int) -> Iterator[tuple[int, int]]:
    """(start, stop) query ranges whose scores stay below MAX_SCORES."""
    rows = query.size(2)
    a_row = max(1, query.size(0) * query.size(1) * keys)
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
    """Scores inside partial and inside full tiles: [Bm, Hm, rows, KV_LEN] bool each, of the batch
    entries of `at` where they have lists of their own."""
    q_idx, kv_idx = at["q"].flatten(), at["kv"].flatten()
    device = q_idx.device
    num_rows = -(-blocks.q_len // blocks.q_block)
    columns = -(-blocks.kv_len // blocks.kv_block)
    num_entries = blocks.entries.size(0)
    b = at["b"].flatten() if blocks.num_batches > 1 else at["b"].new_zeros(1)
    if num_entries == 0:
        shape = (b.size(0), blocks.num_heads, q_idx.size(0), kv_idx.size(0))
        none = torch.zeros(shape, dtype=torch.bool, device=device)
        return none, none
    # One ascending key an entry: its list row, its column, and the low bit of a partial tile.
    spots = torch.arange(num_entries, device=device)
    owner = torch.searchsorted(blocks.row_offsets, spots, right=True) - 1
    keys = owner * (2 * columns) + blocks.entries
    heads = torch.arange(blocks.num_heads, device=device)
    groups = (b[:, None] * blocks.num_heads + heads).flatten()
    rows = groups[:, None] * num_rows + q_idx // blocks.q_block  # [Bm * Hm, rows]
    wanted = rows[..., None] * columns + torch.arange(columns, device=device)
    found = keys[torch.searchsorted(keys, 2 * wanted).clamp(max=num_entries - 1)]
    hit, is_partial = (found >> 1) == wanted, (found & 1) == 1
    shape = (b.size(0), blocks.num_heads, q_idx.size(0), columns)
    column = kv_idx // blocks.kv_block
    partial, full = (
        kind.view(shape)[..., column] for kind in (hit & is_partial, hit & ~is_partial)
    )
    return partial, full
