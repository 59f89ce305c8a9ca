"""The dense oracle for sequences in a cache: one at a time, its keys gathered into a row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from attnloom.backends.reference.attention import (
    ReferenceOutput,
    expand_tiles,
    modified_scores,
    softmax_values,
)
from attnloom.backends.reference.lanes import evaluate_lanes
from attnloom.backends.registry import ForwardResult
from attnloom.block_mask import BlockLists
from attnloom.paged.table import PageTable

Mod = Callable[..., Any]


def gather_rows(storage: torch.Tensor, table: PageTable, b: int, length: int) -> torch.Tensor:
    """[1, Hkv, length, D]: the first `length` rows of sequence b."""
    if table.pages is None:
        return storage[b : b + 1, :, :length] if storage.size(0) > 1 else storage[:, :, :length]
    used = -(-length // table.page_size)
    pages = storage[table.pages[b, :used].long()]  # [used, Hkv, page_size, D]
    return pages.transpose(0, 1).flatten(1, 2)[None, :, :length]


def paged_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: PageTable,
    score_mod: Mod | None = None,
    mask: Mod | Any | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> ReferenceOutput:
    """`reference_attention` of sequences in a cache; see PageTable for what rows and keys are.

    Args:
        mask: a mask_mod, or a BlockMask of whole sequences whose lists are obeyed as well.
        dtype: of the computation and of the result.
    """
    blocks: BlockLists | None = None
    if mask is not None and hasattr(mask, "lists"):
        mask, blocks = mask.mask_mod, mask.lists()
    batch, heads, q_len, _ = query.shape
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(batch, heads, q_len, value.size(3), dtype=dtype, device=query.device)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=dtype, device=query.device)
    top = lse.clone()
    for b, (length, count) in enumerate(zip(*table.on_host(q_len), strict=True)):
        if not length or not count:
            continue
        before = max(0, count - length)  # rows that stand before the sequence
        rows = query[b : b + 1, :, before:count].to(dtype)
        k, v = (gather_rows(t, table, b, length).to(dtype) for t in (key, value))
        found = _one_sequence(rows, k, v, b, score_mod, mask, blocks, factor)
        for whole, part in zip((out, lse, top), found, strict=True):
            whole[b, :, before:count] = part[0]
    return ReferenceOutput(out, lse, top)


def paged_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: PageTable,
    score_mod: Mod | None,
    mask: Any | None,
    scale: float,
) -> ForwardResult:
    """What `kernel_options={"backend": "reference"}` runs on a cache."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    found = paged_reference(query, key, value, table, score_mod, mask, scale, dtype)
    return ForwardResult(found.out.to(query.dtype), found.lse, found.max_scores)


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: int,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    blocks: BlockLists | None,
    scale: float,
) -> ReferenceOutput:
    """Batch entry b, whose queries are the last tokens of its keys."""
    start, group = key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    live = _live(query, key.shape[2], b, start, mask_mod, blocks)
    seen = live.any(dim=-2)[..., None]
    key, value = (torch.where(seen, x, 0.0) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * scale
    mod = None if score_mod is None else functools.partial(_placed, score_mod, b, start)
    return softmax_values(modified_scores(scores, mod, live), value)


def _placed(
    score_mod: Mod, b: int, start: int, score: Any, b_idx: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    """The mod at batch entry b, for queries that begin at position `start`."""
    return score_mod(score, b_idx + b, h, q_idx + start, kv_idx)


def _live(
    query: torch.Tensor,
    length: int,
    b: int,
    start: int,
    mask_mod: Mod | None,
    blocks: BlockLists | None,
) -> torch.Tensor:
    """[1, Hq, count, length] bool: which scores take part."""
    heads, count = query.shape[1:3]
    asked = torch.ones(1, heads, count, length, dtype=torch.bool, device=query.device)
    live = torch.zeros_like(asked)
    if blocks is not None:
        shape = torch.Size((max(b + 1, blocks.num_batches), heads, blocks.q_len, blocks.kv_len))
        partial, live = (
            expand_tiles(blocks, kind, shape)[b : b + 1, :, start : start + count, :length]
            for kind in (1, 0)
        )
        asked = partial & ~live
    if mask_mod is None:
        return live | asked
    at = asked.nonzero(as_tuple=True)
    kept = evaluate_lanes(mask_mod, torch.full_like(at[0], b), at[1], at[2] + start, at[3])
    return live.index_put(at, kept != 0)
