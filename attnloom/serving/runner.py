"""ModelRunner: a step of the model over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.api.attention import ScoreMod, flex_attention
from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.mods import causal_mask, offset, sliding_window, softcap, token_tree
from attnloom.paged import PagedBatch, PagedKVCache
from attnloom.serving.config import LayerAttention
from attnloom.serving.decoder import Decoder
from attnloom.serving.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafts of a part: mods see positions in the cache, where the nodes of a tree lie side by
    side.

    Attributes:
        parents: [B, N] int32, node 0 is the sequence's last token.
        depths: [B, N] int32.
        starts: [B] int32, position of node 0.
    """

    parents: Tensor
    depths: Tensor
    starts: Tensor

    def score_mod(self, layer: LayerAttention) -> ScoreMod:
        """Scores of ancestors alone, in the window as it will be once the drafts are accepted."""
        seen = offset(token_tree(self.parents, self.starts), -self.starts)
        starts, depths, window_left = self.starts, self.depths, layer.window_left
        last = depths.size(1) - 1
        capped = None if layer.softcap is None else softcap(layer.softcap)

        def place(b: Tensor, index: Tensor) -> Tensor:
            node = index - starts[b]
            depth = depths[b, node.clamp(0, last)]
            return torch.where(node < 0, index, starts[b] + depth)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            keep = seen(b, h, q_idx, kv_idx)
            if window_left is not None:
                keep = keep & (place(b, q_idx) - place(b, kv_idx) <= window_left)
            if capped is not None:
                score = capped(score, b, h, q_idx, kv_idx)
            return torch.where(keep, score, -torch.inf)

        return score_mod


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that attend together.

    Attributes:
        tokens: of the step's tokens, those of this part.
        rows: [number of them] where they lie among B * Q_LEN rows; None: as they come.
    """

    batch: PagedBatch
    tokens: slice
    rows: Tensor | None
    tree: Tree | None


class PagedAttention:
    """Attention of one step: writes keys and values of its tokens into pages, then attends."""

    def __init__(self, parts: Items[Part], masks: dict[int | None, BlockMask]) -> None:
        self._parts, self._masks = parts, masks
        self._score_mods: dict[tuple[int, float | None, int | None], ScoreMod | None] = {}

    def __call__(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = [
            self._attend(i, layer, *(x[part.tokens] for x in (query, key, value)))
            for i, part in enumerate(self._parts)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(self, index: int, layer: LayerAttention, *tensors: Tensor) -> Tensor:
        part = self._parts[index]
        query, key, value = (_padded(x, part) for x in tensors)
        part.batch.write(key, value, layer.index)
        out = flex_attention(
            query,
            part.batch.layer(layer.index),
            score_mod=self._score_mod(index, layer),
            # Nodes of a tree lie further apart than they will: a window is the score_mod's then.
            block_mask=self._masks[None if part.tree else layer.window_left],
            scale=layer.scale,
            enable_gqa=True,
        )
        flat = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [B * Q_LEN, Hq * D]
        return flat if part.rows is None else flat[part.rows]

    def _score_mod(self, index: int, layer: LayerAttention) -> ScoreMod | None:
        key, tree = (index, layer.softcap, layer.window_left), self._parts[index].tree
        if key not in self._score_mods:
            plain = None if layer.softcap is None else softcap(layer.softcap)
            self._score_mods[key] = plain if tree is None else tree.score_mod(layer)
        return self._score_mods[key]


def _padded(x: Tensor, part: Part) -> Tensor:
    """[n, H, D] of a part's tokens as [B, H, Q_LEN, D]."""
    size, q_len = part.batch.size, part.batch.q_len
    if part.rows is not None:
        x = x.new_zeros(size * q_len, *x.shape[1:]).index_copy_(0, part.rows, x)
    return x.unflatten(0, (size, q_len)).transpose(1, 2)


class ModelRunner:
    """Runs chunks of sequences through a decoder."""

    def __init__(self, model: Decoder, cache: PagedKVCache, max_length: int) -> None:
        self.model, self.cache = model, cache
        windows = {*model.config.windows, None}
        self._masks = {w: _mask(w, max_length, model.device) for w in windows}

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk]) -> list[Tensor]:
        """Logits after the last token of each chunk, and after each of its drafts, [1 + N, V]
        float32; [0, V] of a chunk that does not end its sequence."""
        decoding = [c for c in chunks if c.num_tokens == 1]
        drafted = [c for c in chunks if c.draft is not None]
        prompts = [c for c in chunks if c.num_tokens > 1 and c.draft is None]
        tokens: list[int] = []
        positions: list[int] = []
        wanted: dict[int, list[int]] = {}
        parts = []
        for group in (decoding, drafted, prompts):
            if not group:
                continue
            start = len(tokens)
            for chunk in group:
                _add_tokens(chunk, tokens, positions)
                asked = 1 + (len(chunk.draft.tokens) if chunk.draft else 0)
                end = len(tokens)
                wanted[id(chunk)] = list(range(end - asked, end)) if chunk.ends else []
            parts.append(self._part(group, slice(start, len(tokens))))
        rows = [row for chunk in chunks for row in wanted[id(chunk)]]
        logits = self.model(
            self._tensor(tokens),
            self._tensor(positions),
            PagedAttention(parts, self._masks),
            self._tensor(rows),
        )
        return list(logits.split([len(wanted[id(chunk)]) for chunk in chunks]))

    def accept(self, chunk: Chunk, path: Items[int]) -> None:
        """Keep the drafts on a path, whose keys and values move behind the sequence; forget the
        others."""
        sequence, cache = chunk.sequence, self.cache
        assert sequence.cached is not None and chunk.draft is not None
        start = sequence.num_computed + chunk.count
        moves = [(start + node, start + i) for i, node in enumerate(path) if node != i]
        if moves:
            pages = cache.book.pages(sequence.cached)
            size = cache.page_size
            source, target = self._tensor([list(m) for m in moves]).unbind(1)
            table = self._tensor(pages)
            for stored in (*cache.keys, *cache.values):
                # Read before anything is written.
                moved = stored[table[source // size], :, source % size]
                stored[table[target // size], :, target % size] = moved
        cache.truncate(sequence.cached, start + len(path))

    def _part(self, chunks: Items[Chunk], tokens: slice) -> Part:
        counts = [chunk.num_tokens for chunk in chunks]
        names = [chunk.sequence.cached for chunk in chunks]
        assert None not in names
        batch = self.cache.extend([name for name in names if name is not None], counts)
        q_len = batch.q_len
        rows = [b * q_len + i for b, count in enumerate(counts) for i in range(count)]
        ragged = len(rows) < len(chunks) * q_len
        tree = _tree(chunks, q_len, batch) if chunks[0].draft is not None else None
        return Part(batch, tokens, self._tensor(rows) if ragged else None, tree)

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device)


def _mask(window_left: int | None, max_length: int, device: torch.device) -> BlockMask:
    mod = causal_mask if window_left is None else sliding_window(window_left)
    return create_block_mask(mod, None, None, max_length, max_length, device=device)


def _add_tokens(chunk: Chunk, tokens: list[int], positions: list[int]) -> None:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    tokens += sequence.tokens[start : start + chunk.count]
    positions += range(start, start + chunk.count)
    if chunk.draft is not None:
        tokens += chunk.draft.tokens
        positions += [start + depth for depth in chunk.draft.depths()]


def _tree(chunks: Items[Chunk], q_len: int, batch: PagedBatch) -> Tree:
    parents, depths = [], []
    for chunk in chunks:
        assert chunk.draft is not None and chunk.count == 1
        padding = [0] * (q_len - chunk.num_tokens)
        # Padding hangs below node 0: nobody asks for it, and it has no keys.
        parents.append([-1, *(parent + 1 for parent in chunk.draft.parents), *padding])
        depths.append([0, *chunk.draft.depths(), *padding])
    starts = [chunk.sequence.num_computed for chunk in chunks]
    made = (torch.tensor(x, dtype=torch.int32) for x in (parents, depths, starts))
    return Tree(*(x.to(batch.table.device) for x in made))
