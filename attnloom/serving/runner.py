"""ModelRunner: a step of the model over the paged cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.errors import CaptureError
from attnloom.paged import PagedBatch, PagedKVCache
from attnloom.paged.staged import StagedInts
from attnloom.serving.attend import PagedAttention, Part, Tree, plant, tree_fields, whole_masks
from attnloom.serving.decoder import Decoder
from attnloom.serving.scheduler import Chunk, Limits
from attnloom.serving.static import CudaGraphs, StaticSteps, StepMode, wants_graphs


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the tokens that something is drawn after.

    Attributes:
        rows: [R, V] float32, of the chunks in order. Valid until the next step.
        counts: how many of them belong to each chunk: 1 + its drafts, 0 if it does not end its
            sequence.
    """

    rows: Tensor
    counts: tuple[int, ...]

    def split(self) -> list[Tensor]:
        """Those of each chunk."""
        return list(self.rows.split(self.counts))


class ModelRunner:
    """Runs chunks of sequences through a decoder.

    Attributes:
        static: what runs decoding steps over tensors of fixed sizes.
    """

    def __init__(
        self, model: Decoder, cache: PagedKVCache, limits: Limits, cuda_graphs: CudaGraphs = False
    ) -> None:
        """Make one.

        Args:
            cuda_graphs: see Engine.
        """
        self.model, self.cache, self.limits = model, cache, limits
        self.masks = whole_masks(model.config, limits.max_length, model.device)
        self._cuda_graphs = cuda_graphs
        self.static = self._static(
            "captured" if wants_graphs(cuda_graphs, model.device) else "exact"
        )

    def warm_up(self) -> None:
        """Capture all steps that may be needed, but those with drafts."""
        try:
            self.static.prepare_all()
        except CaptureError as error:
            self._go_on_eagerly(error)

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk]) -> StepLogits:
        """Extend the sequences by the tokens of chunks, and compute what follows them."""
        return self._static_rows(chunks, None) or self._run(chunks)

    @torch.inference_mode()
    def follow(self, chunks: Items[Chunk], tokens: Tensor) -> StepLogits:
        """The same for a token of each sequence that only the device knows yet.

        Args:
            tokens: [number of chunks] on the device.
        """
        found = self._static_rows(chunks, tokens)
        assert found is not None, "one token a sequence is a decoding step"
        return found

    def _static_rows(self, chunks: Items[Chunk], tokens: Tensor | None) -> StepLogits | None:
        try:
            rows = self.static.run(chunks, tokens)
        except CaptureError as error:
            self._go_on_eagerly(error)
            rows = self.static.run(chunks, tokens)
        if rows is None:
            return None
        return StepLogits(rows, tuple(chunk.num_tokens for chunk in chunks))

    def _go_on_eagerly(self, error: CaptureError) -> None:
        if self._cuda_graphs is True:
            raise error
        warnings.warn(f"{error} Steps run eagerly from now on.", stacklevel=3)
        self.static = self._static("exact")

    def _static(self, mode: StepMode) -> StaticSteps:
        return StaticSteps(self.model, self.cache, self.masks, self.limits, mode)

    def _run(self, chunks: Items[Chunk]) -> StepLogits:
        decoding = [c for c in chunks if c.num_tokens == 1]
        drafted = [c for c in chunks if c.draft is not None]
        prompts = [c for c in chunks if c.num_tokens > 1 and c.draft is None]
        tokens: list[int] = []
        positions: list[int] = []
        wanted: dict[int, range] = {}
        parts = []
        for group in (decoding, drafted, prompts):
            if not group:
                continue
            start = len(tokens)
            for chunk in group:
                _add_tokens(chunk, tokens, positions)
                asked = 1 + (len(chunk.draft.tokens) if chunk.draft else 0) if chunk.ends else 0
                wanted[id(chunk)] = range(len(tokens) - asked, len(tokens))
            parts.append(self._part(group, slice(start, len(tokens))))
        rows = [row for chunk in chunks for row in wanted[id(chunk)]]
        logits = self.model(
            self._tensor(tokens),
            self._tensor(positions),
            PagedAttention(parts, self.masks, self.model.ops),
            None if rows == list(range(len(tokens))) else self._tensor(rows),
        )
        return StepLogits(logits, tuple(len(wanted[id(chunk)]) for chunk in chunks))

    def accept(self, paths: Items[tuple[Chunk, Items[int]]]) -> None:
        """Of each chunk keep the drafts on a path, whose keys and values move behind the sequence;
        forget the others."""
        ends: dict[int, int] = {}
        moves = []
        for chunk, path in paths:
            name = chunk.sequence.cached
            assert name is not None and chunk.draft is not None
            start = chunk.sequence.num_computed + chunk.count
            moves += [(name, start + i, start + node) for i, node in enumerate(path) if node != i]
            ends[name] = start + len(path)
        self.cache.move_tokens(moves)
        for name, end in ends.items():
            self.cache.truncate(name, end)

    def _part(self, chunks: Items[Chunk], tokens: slice) -> Part:
        counts = [chunk.num_tokens for chunk in chunks]
        names = [chunk.sequence.cached for chunk in chunks]
        assert None not in names
        batch = self.cache.extend([name for name in names if name is not None], counts)
        q_len = batch.q_len
        rows = None
        if min(counts) < q_len:
            rows = self._tensor([b * q_len + i for b, n in enumerate(counts) for i in range(n)])
        tree = _tree(chunks, batch) if chunks[0].draft is not None else None
        return Part.of(batch, tokens, rows, tree)

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device)


def _add_tokens(chunk: Chunk, tokens: list[int], positions: list[int]) -> None:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    tokens += sequence.tokens[start : start + chunk.count]
    positions += range(start, start + chunk.count)
    if chunk.draft is not None:
        tokens += chunk.draft.tokens
        positions += [start + depth for depth in chunk.draft.depths()]


def _tree(chunks: Items[Chunk], batch: PagedBatch) -> Tree:
    ints = StagedInts(tree_fields(batch.size, batch.q_len), batch.table.device)
    staging = ints.staging()
    plant(chunks, staging.arrays)
    ints.take(staging)
    return Tree.of(ints.tensors)
