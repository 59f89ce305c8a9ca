"""Rows of PUBLISHED that mask, and those of mods made of masks."""

from __future__ import annotations

from typing import Any

import torch

from attnloom import mods
from tests.harness.draw import Draw, Sizes
from tests.harness.published import canvas_of, mask
from tests.harness.table import Captures

BLOCK = 16


def blocks_of(length: int) -> int:
    return -(-length // BLOCK)


def cu_seqlens(s: Sizes) -> list[int]:
    """Three documents and an empty one, over the longer side."""
    return [0, s.reach // 3, s.reach // 2, s.reach // 2, s.reach]


# along the sequence
mask("noop_mask", lambda c, s: mods.noop_mask)
mask("causal_mask", lambda c, s: mods.causal_mask)
mask("causal_lower_right", lambda c, s: mods.causal_lower_right(s.Q_LEN, s.KV_LEN))
mask("sliding_window", lambda c, s: mods.sliding_window(20))
mask("bidirectional_window", lambda c, s: mods.bidirectional_window(7, 30))
mask("window_with_sinks", lambda c, s: mods.window_with_sinks(20, 4))
mask("dilated_window", lambda c, s: mods.dilated_window(30, 3, window_right=6))
mask("strided_sparse", lambda c, s: mods.strided_sparse(12))
mask("fixed_sparse", lambda c, s: mods.fixed_sparse(16, 2))
mask(
    "longformer",
    lambda c, s: mods.longformer(9, c["is_global"]),
    lambda s, d: {"is_global": d.flags(0.04, s.B, s.reach)},
    axes="b",
)
mask(
    "bigbird",
    lambda c, s: mods.bigbird(s.reach, BLOCK, num_random=1, num_global=1, num_heads=s.Hq),
    axes="h",
)


def _top_blocks(c: Captures, s: Sizes):
    scores = c["scores"].clone()
    scores[:, :, 1:2] = -torch.inf  # a block of queries that may choose none
    return mods.topk_blocks(scores, 2, BLOCK)


mask(
    "topk_blocks",
    _top_blocks,
    lambda s, d: {"scores": d.normal(s.B, s.Hq, blocks_of(s.Q_LEN), blocks_of(s.KV_LEN))},
    axes="bh",
)
mask(
    "selected_blocks",
    lambda c, s: mods.selected_blocks(c["indices"], s.KV_LEN, BLOCK),
    lambda s, d: {"indices": d.integers(-1, blocks_of(s.KV_LEN) + 1, s.Hq, blocks_of(s.Q_LEN), 3)},
    axes="h",
)

# several texts in one
mask(
    "prefix_lm",
    lambda c, s: mods.prefix_lm([s.KV_LEN // (2 + b) for b in range(s.B)]),
    axes="b",
)
mask(
    "documents",
    lambda c, s: mods.documents(c["ids"]),
    lambda s, d: {"ids": d.documents(s.reach, 5)},
)
mask(
    "documents/unsorted",
    lambda c, s: mods.documents(c["ids"]),
    lambda s, d: {"ids": d.integers(0, 4, s.B, s.reach)},
    axes="b",
)
mask("documents_from_cu_seqlens", lambda c, s: mods.documents_from_cu_seqlens(cu_seqlens(s)))


def _shared_prefix(c: Captures, s: Sizes):
    prefix = s.reach // 4
    rest = s.reach - prefix
    return mods.shared_prefix(prefix, [0, rest // 3, rest // 3, rest])


mask("shared_prefix", _shared_prefix)
mask(
    "right_padding",
    lambda c, s: mods.right_padding([s.KV_LEN - b * (s.KV_LEN // 3) for b in range(s.B)]),
    axes="b",
)
mask(
    "left_padding",
    lambda c, s: mods.left_padding([b * (s.KV_LEN // 3) for b in range(s.B)]),
    axes="b",
)
mask(
    "key_padding",
    lambda c, s: mods.key_padding(c["keep"]),
    lambda s, d: {"keep": d.flags(0.6, s.B, s.KV_LEN)},
    axes="b",
)
mask("block_diffusion", lambda c, s: mods.block_diffusion(max(s.reach // 2, 1), 8))


def _parents(s: Sizes, d: Draw) -> Captures:
    """A random tree for each batch entry: each parent is -1 or comes before its child."""
    return {"parents": d.integers(0, 1 << 40, s.B, s.Q_LEN) % (torch.arange(s.Q_LEN) + 1) - 1}


def _prefixes(s: Sizes) -> list[int]:
    return [max(s.KV_LEN - s.Q_LEN - 3 * b, 0) for b in range(s.B)]


mask("token_tree", lambda c, s: mods.token_tree(c["parents"], _prefixes(s)), _parents, axes="b")
mask(
    "token_tree_from_bits",
    lambda c, s: mods.token_tree_from_bits(mods.ancestor_bits(c["parents"]), _prefixes(s)),
    _parents,
    axes="b",
)
mask(
    "flamingo",
    lambda c, s: mods.flamingo(c["media"], 8),
    lambda s, d: {"media": d.flags(0.1, s.B, s.Q_LEN)},
    axes="b",
)


# images and videos
def _kernel(s: Sizes) -> tuple[int, ...]:
    return tuple(min(3, n) for n in canvas_of(s))


def _dilated(c: Captures, s: Sizes):
    canvas, kernel = canvas_of(s), _kernel(s)
    steps = tuple(min(2, n // k) for n, k in zip(canvas, kernel, strict=True))
    return mods.neighborhood(canvas, kernel, steps, is_causal=(True, False))


def _neighborhood(s: Sizes, order: Any = None):
    return mods.neighborhood(canvas_of(s), _kernel(s), order=order)


mask("neighborhood", lambda c, s: _neighborhood(s), square=True)
mask("neighborhood/dilated", _dilated, square=True)
mask(
    "tiled_order",
    lambda c, s: _neighborhood(s, mods.tiled_order(canvas_of(s), 4)),
    square=True,
)
mask(
    "morton_order",
    lambda c, s: _neighborhood(s, mods.morton_order(canvas_of(s))),
    square=True,
)
mask("sliding_tile", lambda c, s: mods.sliding_tile(canvas_of(s), 2, 3), square=True)
mask("swin_window", lambda c, s: mods.swin_window(canvas_of(s), 4, 2), square=True)
mask("spatial_head", lambda c, s: mods.spatial_head(25, 1))
mask("temporal_head", lambda c, s: mods.temporal_head(9, 2))

# masks from masks
mask("not_mask", lambda c, s: mods.not_mask(mods.bidirectional_window(20)))
mask("and_masks", lambda c, s: mods.and_masks(mods.causal_mask, mods.spatial_head(25, 1)))
mask("or_masks", lambda c, s: mods.or_masks(mods.sliding_window(8), mods.fixed_sparse(16, 2)))
mask("xor_masks", lambda c, s: mods.xor_masks(mods.causal_mask, mods.bidirectional_window(30)))
mask(
    "per_head",
    lambda c, s: mods.per_head(
        mods.sliding_window(8),
        mods.window_with_sinks(16, 4),
        mods.prefix_lm(40),
        heads=[h % 3 for h in range(s.Hq)],
    ),
    axes="h",
)
mask(
    "offset",
    lambda c, s: mods.offset(
        mods.sliding_window(30), torch.tensor([9 + 20 * b for b in range(s.B)])
    ),
    axes="b",
)
mask(
    "on_documents",
    lambda c, s: mods.on_documents(mods.prefix_lm([4, 9, 1, 0]), cu_seqlens=cu_seqlens(s)),
)
mask(
    "on_documents/ids",
    lambda c, s: mods.on_documents(mods.sliding_window(5), ids=c["ids"]),
    lambda s, d: {"ids": d.integers(0, 4, s.B, s.reach)},
    axes="b",
)


def _places(s: Sizes, d: Draw) -> Captures:
    """Tokens in any order, and places that hold none."""
    place = d.uniform(0.0, 1.0, s.reach).argsort()
    return {"place": place.masked_fill(place % 7 == 3, -1)}


mask(
    "logical_to_physical",
    lambda c, s: mods.logical_to_physical(mods.sliding_window(40), c["place"]),
    _places,
)
