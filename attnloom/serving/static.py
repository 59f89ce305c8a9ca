"""Decoding steps whose tensors stay where they are, and their CUDA graphs.

A step in which every sequence computes its last token, with drafts behind it or without, is the
same work each time but for numbers. It runs over tensors of fixed sizes that take the numbers in
place: tokens, positions, page tables, trees. On a CUDA device the work is captured once for each
size and replayed, so that the host starts one graph in place of some hundred kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attnloom.errors import CaptureError, OptionError, counted
from attnloom.paged import PagedKVCache
from attnloom.paged.staged import StagedInts
from attnloom.serving.attend import Masks, PagedAttention, Part, Tree, plant, tree_fields
from attnloom.serving.decoder import Decoder
from attnloom.serving.scheduler import Chunk, Limits

CudaGraphs = Literal["auto"] | bool
StepMode = Literal["captured", "padded", "exact"]

_SIZES = (1, 2, 4, 8)  # then multiples of
_SIZE_STEP = 16
_WARM_UP = 2  # eager runs before a capture: what is compiled, chosen and allocated once


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sequences and tokens of each that a step has room for."""

    size: int
    q_len: int


class StaticStep:
    """A decoding step of at most `size` sequences with at most `q_len` tokens each."""

    def __init__(
        self, model: Decoder, cache: PagedKVCache, masks: Masks, shape: StepShape, max_length: int
    ) -> None:
        size, q_len = shape.size, shape.q_len
        self._model, self._cache, self._shape = model, cache, shape
        self._batch = cache.empty_batch(size, max_length, q_len)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tokens": (torch.int64, (size, q_len))
        }
        if q_len > 1:
            fields |= tree_fields(size, q_len)
            # of tokens in their texts: drafts of one depth share one
            fields["positions"] = (torch.int64, (size, q_len))
            fields["rows"] = (torch.int64, (size * q_len,))
        self._ints = StagedInts(fields, model.device)
        held = self._ints.tensors
        self._tokens = held["tokens"].flatten()
        self._positions = held.get("positions", self._batch.positions).flatten()
        self._rows = held.get("rows")
        tree = Tree.of(held) if q_len > 1 else None
        part = Part.of(self._batch, slice(0, size * q_len), None, tree)
        self._attention = PagedAttention([part], masks, model.ops)

    @property
    def device(self) -> torch.device:
        return self._model.device

    def take(self, chunks: Items[Chunk], tokens: Tensor | None = None) -> None:
        """Extend the sequences of chunks by their tokens, which the next `compute` runs on.

        Args:
            tokens: [number of chunks] on the device, where they are known there alone yet; chunks
                without drafts.
        """
        names = [name for name in (chunk.sequence.cached for chunk in chunks) if name is not None]
        counts = [chunk.num_tokens for chunk in chunks]
        assert len(names) == len(counts)
        self._cache.grow(names, counts)
        self._batch.update(names, counts)
        if tokens is not None:
            assert self._shape.q_len == 1
            self._tokens[: len(tokens)].copy_(tokens)
            return
        staging = self._ints.staging()
        into = staging.arrays
        into["tokens"][: len(chunks), 0] = [chunk.sequence.tokens[-1] for chunk in chunks]
        if self._shape.q_len > 1:
            self._take_drafts(chunks, into)
        self._ints.take(staging)

    def _take_drafts(self, chunks: Items[Chunk], into: dict[str, np.ndarray]) -> None:
        plant(chunks, into)
        rows: list[int] = []
        for b, chunk in enumerate(chunks):
            first = b * self._shape.q_len
            rows += range(first, first + chunk.num_tokens)
            if chunk.draft is not None:
                into["tokens"][b, 1 : chunk.num_tokens] = chunk.draft.tokens
        into["positions"][:] = into["starts"][:, None] + into["depths"]
        into["rows"][: len(rows)] = rows

    def compute(self) -> Tensor:
        """Logits of all rows, [size * q_len, V]; first those of tokens that exist, in order."""
        return self._model(self._tokens, self._positions, self._attention, self._rows)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A step as a graph; its logits lie in memory that the next replay writes to."""

    step: StaticStep
    graph: torch.cuda.CUDAGraph | None
    logits: Tensor | None

    def run(self, chunks: Items[Chunk], tokens: Tensor | None) -> Tensor:
        self.step.take(chunks, tokens)
        if self.graph is None or self.logits is None:
            return self.step.compute()
        self.graph.replay()
        return self.logits


class StaticSteps:
    """The static steps of a model, made when their shape is first met.

    Attributes:
        num_runs: steps that ran this way.
    """

    def __init__(
        self, model: Decoder, cache: PagedKVCache, masks: Masks, limits: Limits, mode: StepMode
    ) -> None:
        """Make none yet.

        Args:
            mode: "captured": as CUDA graphs, of a few sizes. "padded": of the same sizes, eagerly.
                "exact": eagerly, as many rows as there are sequences; drafts are left to others.
        """
        self._model, self._cache, self._masks, self._limits = model, cache, masks, limits
        self._mode: StepMode = mode
        self._made: dict[StepShape, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if mode == "captured" else None
        self.num_runs = 0

    def shape_of(self, chunks: Items[Chunk]) -> StepShape | None:
        """The shape that these chunks run in; None if they are no decoding step."""
        if not all(chunk.count == 1 and chunk.ends for chunk in chunks):
            return None
        longest = max(chunk.num_tokens for chunk in chunks)
        if self._mode == "exact":
            return StepShape(len(chunks), 1) if longest == 1 else None
        q_len = 1 << (longest - 1).bit_length()
        sizes = step_sizes(self._limits.max_running)
        size = sizes[bisect_left(sizes, len(chunks))]
        if q_len > 1 and size * q_len > self._limits.max_step_tokens:
            return None  # mostly padding, or as much work as a prompt
        return StepShape(size, q_len)

    def prepare(self, shape: StepShape) -> None:
        """Make and capture the step of a shape, unless that was done.

        Raises:
            CaptureError: the model's work cannot be captured.
        """
        if shape in self._made:
            return
        step = StaticStep(self._model, self._cache, self._masks, shape, self._limits.max_length)
        graph, logits = None, None
        if self._mode == "captured":
            graph, logits = _captured(step, shape, self._pool)
        self._made[shape] = _Captured(step, graph, logits)

    @torch.inference_mode()
    def prepare_all(self) -> None:
        """Make the steps without drafts that are captured, the largest first, in whose memory the
        others fit."""
        if self._mode == "exact":
            return
        for size in reversed(step_sizes(self._limits.max_running)):
            self.prepare(StepShape(size, 1))

    def run(self, chunks: Items[Chunk], tokens: Tensor | None = None) -> Tensor | None:
        """Logits of all tokens of the chunks in order, [R, V], valid until the next step; None if
        they are no decoding step.

        Args:
            tokens: see StaticStep.take.
        Raises:
            CaptureError: the model's work cannot be captured; nothing was changed.
        """
        shape = self.shape_of(chunks)
        if shape is None:
            return None
        self.prepare(shape)
        self.num_runs += 1
        return self._made[shape].run(chunks, tokens)[: sum(chunk.num_tokens for chunk in chunks)]


def _captured(step: StaticStep, shape: StepShape, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step over empty sequences, which write nothing that anybody reads."""
    try:
        side, graph = torch.cuda.Stream(step.device), torch.cuda.CUDAGraph()
        with torch.cuda.device(step.device):
            step.take(())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    step.compute()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = step.compute()
    except RuntimeError as error:
        raise CaptureError(
            f"a step of {counted(shape.size, 'sequence')} with {counted(shape.q_len, 'token')} "
            f"each cannot be captured as a CUDA graph: {error}. A graph holds no work that waits "
            "for the device, such as .item() in a decoder of your own. Use cuda_graphs=False."
        ) from error
    return graph, logits


def wants_graphs(cuda_graphs: CudaGraphs, device: torch.device) -> bool:
    """Whether steps are to be captured.

    Raises:
        OptionError: graphs are asked for where there are none, or the option means nothing.
    """
    if type(cuda_graphs) is not bool and cuda_graphs != "auto":
        raise OptionError(f"cuda_graphs is {cuda_graphs!r}; it must be 'auto', True or False.")
    if cuda_graphs is True and device.type != "cuda":
        raise OptionError(
            f"cuda_graphs is True, but the model is on {device}; only a CUDA device has graphs. "
            "'auto' captures steps there and runs them eagerly elsewhere."
        )
    return bool(cuda_graphs) and device.type == "cuda"


def step_sizes(most: int) -> list[int]:
    """Numbers of sequences that steps are made for, ascending; the last one is `most`."""
    sizes = [*_SIZES, *range(_SIZE_STEP, most, _SIZE_STEP)]
    return [*(n for n in sizes if n < most), most]
