"""Parts of an attention problem: heads computed together, and keys that a row tile visits.

Heads that share a block list are one part, in as many batch entries as a bounded tile allows.
Inside a part, scores are [B, Hkv, G, rows, keys], where query head h is Hkv * G + g.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall

# Tiles are large, because an operator costs microseconds, and bounded, because a tile lives in
# memory several times over: 2^21 scores are 8 MiB of float32.
MAX_ROWS = 128
MAX_KEYS = 512
MAX_SCORES = 1 << 21


@dataclass(frozen=True, slots=True)
class Part:
    """Batch entries b0 .. b1 and query heads h0 .. h1, which share the lists of mask row (b, h).

    b_at, q_at: added to batch entries and query rows before a mod sees them.
    """

    b0: int
    b1: int
    h0: int
    h1: int
    mask_b: int
    mask_h: int
    b_at: int = 0
    q_at: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows q0 .. q1 and the key ranges that are live for them."""

    q0: int
    q1: int
    keys: tuple[Keys, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys k0 .. k1; partial says that the mask decides score by score."""

    k0: int
    k1: int
    partial: bool


def parts(call: AttentionCall) -> Iterator[Part]:
    """Parts that cover every batch entry and query head once."""
    B, Hq = call.query.shape[:2]
    blocks = call.blocks
    batches = 1 if blocks is None else blocks.num_batches
    heads = 1 if blocks is None else blocks.num_heads
    for mask_h in range(heads):
        h0, h1 = (0, Hq) if heads == 1 else (mask_h, mask_h + 1)
        together = max(1, MAX_SCORES // ((h1 - h0) * MAX_ROWS * MAX_KEYS))
        for mask_b in range(batches):
            first, last = (0, B) if batches == 1 else (mask_b, mask_b + 1)
            for b0 in range(first, last, together):
                yield Part(b0, min(b0 + together, last), h0, h1, mask_b, mask_h)


def rows(call: AttentionCall, part: Part) -> Iterator[Rows]:
    """Row tiles of a part; a tile never crosses a block."""
    Q_LEN, KV_LEN = call.query.size(2), call.key.size(2)
    blocks = call.blocks
    at = part.q_at
    if blocks is None:
        keys = tuple(_split(0, KV_LEN, False))
        for q0 in range(0, Q_LEN, MAX_ROWS):
            yield Rows(q0, min(q0 + MAX_ROWS, Q_LEN), keys)
        return
    num_rows = -(-blocks.q_len // blocks.q_block)
    first = (part.mask_b * blocks.num_heads + part.mask_h) * num_rows
    offsets = blocks.row_offsets[first : first + num_rows + 1].tolist()
    for block in range(at // blocks.q_block, -(-(at + Q_LEN) // blocks.q_block)):
        entries = blocks.entries[offsets[block] : offsets[block + 1]].tolist()
        keys = tuple(_merged(entries, blocks.kv_block, KV_LEN))
        end = min((block + 1) * blocks.q_block - at, Q_LEN)
        for q0 in range(max(0, block * blocks.q_block - at), end, MAX_ROWS):
            yield Rows(q0, min(q0 + MAX_ROWS, end), keys)


def _merged(entries: list[int], kv_block: int, kv_len: int) -> Iterator[Keys]:
    """Neighbouring blocks of one kind as one range, cut to MAX_KEYS."""
    start = stop = 0
    partial = False
    for entry in entries:
        k0, is_partial = (entry >> 1) * kv_block, bool(entry & 1)
        if k0 != stop or is_partial != partial:
            yield from _split(start, min(stop, kv_len), partial)
            start, partial = k0, is_partial
        stop = k0 + kv_block
    yield from _split(start, min(stop, kv_len), partial)


def _split(start: int, stop: int, partial: bool) -> Iterator[Keys]:
    for k0 in range(start, stop, MAX_KEYS):
        yield Keys(k0, min(k0 + MAX_KEYS, stop), partial)


def query_rows(tensor: torch.Tensor, part: Part, kv_heads: int, rows: Rows) -> torch.Tensor:
    """Rows of a [B, Hq, Q_LEN, ...] tensor as [B, Hkv, G, rows, ...]."""
    taken = tensor[part.b0 : part.b1, part.h0 : part.h1, rows.q0 : rows.q1]
    return taken.reshape(taken.size(0), kv_heads, -1, *taken.shape[2:])


def key_slices(call: AttentionCall, part: Part) -> tuple[slice, slice]:
    """Batch entries and heads of key and value that a part reads."""
    group = call.query.size(1) // call.key.size(1)
    batch = slice(0, 1) if call.key.size(0) == 1 else slice(part.b0, part.b1)
    return batch, slice(part.h0 // group, -(-part.h1 // group))
