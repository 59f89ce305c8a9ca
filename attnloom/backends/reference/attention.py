"""Dense scaled dot-product attention with a score_mod and a mask, differentiable by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnloom.backends.reference.lanes import evaluate_lanes
from attnloom.backends.registry import ForwardResult
from attnloom.block_mask import BlockLists
from attnloom.errors import ShapeError, counted

Mod = Callable[..., Any]


class ReferenceOutput(NamedTuple):
    """out [B, Hq, Q_LEN, Dv]; lse and max_scores [B, Hq, Q_LEN]; all in the computing dtype."""

    out: torch.Tensor
    lse: torch.Tensor
    max_scores: torch.Tensor


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    mask: Mod | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    dtype: torch.dtype = torch.float64,
) -> ReferenceOutput:
    """Attention with every score in memory, computed in `dtype` whatever the inputs are.

        score = score_mod(scale * query @ key^T, b, h, q_idx, kv_idx), -inf where the mask is false
        out = softmax(score) @ value

    The score_mod is called only where the mask keeps the score, so that what it does elsewhere
    (a logarithm of zero, an index out of range) reaches neither the result nor a gradient.
    Captured tensors take part in their own dtype; pass float64 ones for float64 accuracy.

    Args:
        query: [B, Hq, Q_LEN, D], any strides.
        key, value: [Bkv, Hkv, KV_LEN, D] and [Bkv, Hkv, KV_LEN, Dv]; Bkv is B or 1 and Hq is a
            multiple of Hkv.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, on one score at a time.
        mask: a mask_mod(b, h, q_idx, kv_idx) -> bool, called for every score; or a BlockMask,
            whose tile lists are then obeyed as well: its mod is asked in partial tiles only.
        scale: multiplies query @ key^T before the score_mod; 1 / sqrt(D) if None.
        enable_gqa: whether Hq may differ from Hkv.
        dtype: of the computation and of the result, torch.float64 for an oracle.
    Returns:
        ReferenceOutput; unpacks to (out, lse, max_scores). A row without keys has out 0, lse and
        max_scores -inf, and gives no gradient. lse is the natural logarithm and differentiable;
        max_scores is not.
    Raises:
        ShapeError: the sizes of query, key and value do not fit together.
        UnsupportedError: a mod can only run one score at a time and there are too many scores.
    Source: Dong et al. 2024, arXiv:2412.05496, section 3.
    """
    _check_shapes(query, key, value, enable_gqa)
    blocks: BlockLists | None = None
    if mask is not None and hasattr(mask, "lists"):
        mask, blocks = mask.mask_mod, mask.lists()
    return _attention(
        query.to(dtype), key.to(dtype), value.to(dtype), score_mod, mask, blocks, scale
    )


def reference_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    blocks: BlockLists | None,
    scale: float | None,
) -> ForwardResult:
    """What `kernel_options={"backend": "reference"}` runs, on already validated inputs.

    Computes in float64 for float64 inputs and in float32 otherwise; autograd differentiates it,
    captured tensors included. mask_mod is asked in the partial tiles of `blocks`, and everywhere
    if blocks is None.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = _attention(
        query.to(dtype), key.to(dtype), value.to(dtype), score_mod, mask_mod, blocks, scale
    )
    return ForwardResult(result.out.to(query.dtype), result.lse, result.max_scores)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    blocks: BlockLists | None,
    scale: float | None,
) -> ReferenceOutput:
    batch, heads = query.shape[:2]
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value = (_one_per_query_head(x, batch, heads) for x in (key, value))
    live = _live(mask_mod, blocks, query, key)
    # A key that no query sees may hold anything, NaN too.
    seen = live.any(dim=-2)[..., None]
    key, value = (torch.where(seen, x, 0.0) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * scale  # [B, Hq, Q_LEN, KV_LEN]
    return softmax_values(modified_scores(scores, score_mod, live), value)


def modified_scores(
    scores: torch.Tensor, score_mod: Mod | None, live: torch.Tensor
) -> torch.Tensor:
    """Scores after the mod, -inf where they are not live."""
    nothing = torch.full_like(scores, -math.inf)
    if score_mod is None:
        return torch.where(live, scores, nothing)
    positions = live.nonzero(as_tuple=True)
    kept = evaluate_lanes(score_mod, scores[positions], *positions)
    return nothing.index_put(positions, kept.to(scores.dtype))


def softmax_values(scores: torch.Tensor, value: torch.Tensor) -> ReferenceOutput:
    if scores.shape[-1]:
        m_i = scores.detach().amax(dim=-1)
    else:
        m_i = scores.new_full(scores.shape[:-1], -math.inf)
    empty = m_i == -math.inf
    shift = torch.where(empty, 0.0, m_i)
    weights = torch.exp(scores - shift[..., None])
    l_i = torch.where(empty, 1.0, weights.sum(dim=-1))
    lse = torch.where(empty, -math.inf, torch.log(l_i) + shift)
    return ReferenceOutput((weights / l_i[..., None]) @ value, lse, m_i)


def _live(
    mask_mod: Mod | None, blocks: BlockLists | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """[B, Hq, Q_LEN, KV_LEN] bool: which scores take part."""
    shape = torch.Size((*query.shape[:3], key.shape[2]))
    asked = torch.ones(shape, dtype=torch.bool, device=query.device)
    if mask_mod is None and blocks is None:
        return asked
    live = torch.zeros_like(asked)
    q_offset = kv_offset = 0
    if blocks is not None:
        partial, live = (expand_tiles(blocks, kind, shape) for kind in (1, 0))
        asked, q_offset, kv_offset = partial & ~live, blocks.q_offset, blocks.kv_offset
    if mask_mod is None:
        return live | asked
    b, h, q_idx, kv_idx = asked.nonzero(as_tuple=True)
    kept = evaluate_lanes(mask_mod, b, h, q_idx + q_offset, kv_idx + kv_offset)
    return live.index_put((b, h, q_idx, kv_idx), kept != 0)


def expand_tiles(blocks: BlockLists, kind: int, shape: torch.Size) -> torch.Tensor:
    """[B, Hq, Q_LEN, KV_LEN] bool: tokens inside tiles of a kind, 1 partial or 0 full."""
    rows, columns = -(-blocks.q_len // blocks.q_block), -(-blocks.kv_len // blocks.kv_block)
    entries = blocks.entries.long()
    owner = torch.repeat_interleave(
        torch.arange(blocks.row_offsets.numel() - 1, device=entries.device),
        blocks.row_offsets.diff(),
    )
    chosen = (entries & 1) == kind
    tiles = torch.zeros(
        blocks.num_batches * blocks.num_heads * rows,
        columns,
        dtype=torch.bool,
        device=entries.device,
    )
    tiles[owner[chosen], entries[chosen] >> 1] = True
    tokens = tiles.view(blocks.num_batches, blocks.num_heads, rows, columns)
    tokens = tokens.repeat_interleave(blocks.q_block, 2).repeat_interleave(blocks.kv_block, 3)
    return tokens[:, :, : shape[2], : shape[3]].expand(shape)


def _one_per_query_head(tensor: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """[Bkv, Hkv, L, D] -> [B, Hq, L, D]; head h reads h // (Hq / Hkv)."""
    group = heads // tensor.shape[1] if tensor.shape[1] else 1
    return tensor.repeat_interleave(group, dim=1).expand(batch, -1, -1, -1)


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    shapes = f"Got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}."
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ShapeError(f"query, key and value must be [B, H, L, D]. {shapes}")
    heads, key_heads = query.shape[1], key.shape[1]
    rules = (
        (query.shape[3] == key.shape[3], "query and key differ in head dimension"),
        (key.shape[:3] == value.shape[:3], "key and value differ in batch, heads or length"),
        (key.shape[0] in (1, query.shape[0]), "the batch of key must be 1 or that of query"),
        (key_heads == heads or enable_gqa, "head counts differ; pass enable_gqa=True"),
        (
            heads == key_heads or (key_heads > 0 and heads % key_heads == 0),
            f"query has {counted(heads, 'head')}, key has {key_heads}; query heads must be a "
            "multiple of key heads",
        ),
    )
    for holds, problem in rules:
        if not holds:
            raise ShapeError(f"{problem}. {shapes}")
