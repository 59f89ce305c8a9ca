"""PagedAttention: attention of one step, over the pages of the sequences that take part."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod
from attnloom.api.masks import create_block_mask
from attnloom.api.prepared import PreparedAttention
from attnloom.block_mask import BlockMask
from attnloom.mods import causal_mask, sliding_window, softcap
from attnloom.mods.token_tree import walk
from attnloom.paged import PagedBatch, PagedKV
from attnloom.serving.config import LayerAttention, ModelConfig
from attnloom.serving.ops import TORCH, Ops
from attnloom.serving.scheduler import Chunk

Masks = dict[int | None, BlockMask]
LayerKind = tuple[float, int | None, float | None]


def whole_masks(config: ModelConfig, max_length: int, device: torch.device) -> Masks:
    """Masks of whole sequences by window_left; None: without a window, which drafts need too."""
    windows = {*config.windows, None}
    return {window: _mask(window, max_length, device) for window in windows}


def _mask(window_left: int | None, max_length: int, device: torch.device) -> BlockMask:
    mod = causal_mask if window_left is None else sliding_window(window_left)
    return create_block_mask(mod, None, None, max_length, max_length, device=device)


def tree_fields(size: int, q_len: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Those of a Tree, as StagedInts takes them."""
    nodes = (torch.int32, (size, q_len))
    return {"enter": nodes, "leave": nodes, "depths": nodes, "starts": (torch.int32, (size,))}


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafts of a part: mods see positions in the cache, where the nodes of a tree lie side by
    side. Read when kernels run, so that other trees may be written over them.

    Attributes:
        enter, leave: [B, N] int32, numbers of `mods.token_tree`; node 0 is the sequence's last
            token.
        depths: [B, N] int32.
        starts: [B] int32, position of node 0.
    """

    enter: Tensor
    leave: Tensor
    depths: Tensor
    starts: Tensor

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Tree:
        """The tree whose fields are among some tensors."""
        return cls(tensors["enter"], tensors["leave"], tensors["depths"], tensors["starts"])

    def score_mod(self, layer: LayerAttention) -> ScoreMod:
        """Scores of ancestors alone, in the window as it will be once the drafts are accepted."""
        enter, leave, depths, starts = self.enter, self.leave, self.depths, self.starts
        last, window_left = depths.size(1) - 1, layer.window_left
        capped = None if layer.softcap is None else softcap(layer.softcap)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            start = starts[b]
            query, node = (q_idx - start).clamp(0, last), kv_idx - start
            key = node.clamp(0, last)
            entered = enter[b, query]
            keep = (node < 0) | ((entered >= enter[b, key]) & (entered < leave[b, key]))
            if window_left is not None:
                place = torch.where(node < 0, node, depths[b, key])
                keep = keep & (depths[b, query] - place <= window_left)
            if capped is not None:
                score = capped(score, b, h, q_idx, kv_idx)
            return torch.where(keep, score, -torch.inf)

        return score_mod


def plant(chunks: Items[Chunk], arrays: dict[str, np.ndarray]) -> None:
    """Write the trees of chunks into the fields of a Tree. What is left 0 is padding, which has
    neither keys nor queries."""
    for b, chunk in enumerate(chunks):
        draft, n = chunk.draft, chunk.num_tokens
        arrays["starts"][b] = chunk.sequence.num_computed
        if draft is None:
            arrays["leave"][b, 0] = 1
            continue
        arrays["enter"][b, :n], arrays["leave"][b, :n] = walk(
            [-1, *(parent + 1 for parent in draft.parents)]
        )
        arrays["depths"][b, 1:n] = draft.depths()


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that attend together.

    Attributes:
        tokens: of the step's tokens, those of this part.
        rows: [number of them] where they lie among B * Q_LEN rows; None: as they come.
        places: of their keys and values among the rows of the cache.
    """

    batch: PagedBatch
    tokens: slice
    rows: Tensor | None
    places: Tensor
    tree: Tree | None

    @classmethod
    def of(cls, batch: PagedBatch, tokens: slice, rows: Tensor | None, tree: Tree | None) -> Part:
        """The part whose tokens are some rows of a batch."""
        places = batch.rows if rows is None else batch.rows.flatten(0, 1)[rows]
        return cls(batch, tokens, rows, places.flatten(), tree)


class PagedAttention:
    """Attention of one step: writes keys and values of its tokens into pages, then attends."""

    def __init__(self, parts: Items[Part], masks: Masks, ops: Ops = TORCH) -> None:
        self._parts, self._masks, self._ops = parts, masks, ops
        self._prepared: dict[tuple[int, LayerKind], PreparedAttention] = {}

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self._parts) == 1:
            return self._attend(0, layer, query, key, value)
        return torch.cat(
            [
                self._attend(i, layer, *(x[part.tokens] for x in (query, key, value)))
                for i, part in enumerate(self._parts)
            ]
        )

    def _attend(
        self, index: int, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        part = self._parts[index]
        batch = part.batch
        kv = batch.layer(layer.index)  # refuses a stale batch, whose rows may be another's now
        self._ops.append((key, value), batch.cache.layer_rows(layer.index), part.places)
        num_rows = batch.size * batch.q_len
        if part.rows is not None:
            padded = query.new_zeros(num_rows, *query.shape[1:])
            query = padded.index_copy_(0, part.rows, query)
        # [B, Hq, Q_LEN, D]
        query = query.view(batch.size, batch.q_len, *query.shape[1:]).transpose(1, 2)
        kind = (layer.scale, layer.window_left, layer.softcap)
        prepared = self._prepared.get((index, kind))
        if prepared is None:
            prepared = self._prepare(part, layer, query, kv)
            self._prepared[index, kind] = prepared
        out = prepared(query, kv).transpose(1, 2).reshape(num_rows, -1)
        return out if part.rows is None else out[part.rows]

    def _prepare(
        self, part: Part, layer: LayerAttention, query: Tensor, kv: PagedKV
    ) -> PreparedAttention:
        if part.tree is not None:
            # Nodes of a tree lie further apart than they will: a window is the score_mod's then.
            score_mod, mask = part.tree.score_mod(layer), self._masks[None]
        else:
            score_mod = None if layer.softcap is None else softcap(layer.softcap)
            mask = self._masks[layer.window_left]
        return PreparedAttention(query, kv, score_mod, mask, layer.scale)
