"""What every backend is given and gives back, and the table of backends."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attnloom.backends.collecting import uncollected
from attnloom.block_mask import BlockLists
from attnloom.ir.node import BoundProgram
from attnloom.paged.table import PageTable
from attnloom.plan.problem import KernelOptions


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention problem, already validated.

    query [B, Hq, Q_LEN, D], key [Bkv, Hkv, KV_LEN, D], value [Bkv, Hkv, KV_LEN, Dv]; any strides;
        Bkv is B or 1; Hq is a multiple of Hkv.
    score, mask: traced mods, None where there is none.
    blocks: live tiles; None means that every tile is full.
    scale: multiplies query @ key^T before the score_mod.
    table: how long each sequence is and, with pages, where its keys lie: key and value are then
        [num_pages, Hkv, page_size, D]. Query row i of batch entry b stands at position
        lengths[b] - counts[b] + i, for score, mask and blocks alike; blocks are those of whole
        sequences. No gradients. None: query row i stands at position i.
    for_backward: a forward whose row_state a backward will be given, if it has one.
    row_state: of a backward, what its forward returned as such.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: BoundProgram | None
    mask: BoundProgram | None
    blocks: BlockLists | None
    scale: float
    options: KernelOptions
    table: PageTable | None = None
    for_backward: bool = False
    row_state: torch.Tensor | None = None

    @property
    def learns(self) -> bool:
        """Whether captured tensors of the score_mod get gradients."""
        score = self.score
        return score is not None and any(t.requires_grad for t in score.program.tensors)

    @property
    def kv_len(self) -> int:
        """Keys of a sequence at most: KV_LEN, or what its pages hold."""
        table = self.table
        if table is None:
            return self.key.size(2)
        held = self.key.size(2) if table.pages is None else table.pages.size(1) * table.page_size
        return min(held, table.max_length)

    @property
    def kv_batch(self) -> int:
        """B, or 1 where all batch entries share one key and value."""
        paged = self.table is not None and self.table.pages is not None
        return self.query.size(0) if paged else self.key.size(0)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """out [B, Hq, Q_LEN, Dv] in query's dtype; lse and max_scores [B, Hq, Q_LEN] float32 (float64
    for float64 inputs), natural logarithm; -inf for a row without keys (where out is 0).

    row_state: what a backend knows of each row beyond lse, for its own backward alone; None where
        lse is enough. A backward has to do without, as operators and transforms do not carry it.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_scores: torch.Tensor | None
    row_state: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of query, key, value in their shapes and dtypes, and of call.score.tensors
    (None where the tensor does not require grad), in the tensors' dtypes and shapes."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dtensors: tuple[torch.Tensor | None, ...]


class ForwardAgain(Protocol):
    """What `forward` gives for query, key, value and the captured tensors of score and mask, like
    those of an earlier call in everything but addresses and contents; None where it has to be
    asked."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> ForwardResult | None: ...

    def out(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
    ) -> torch.Tensor | None:
        """Its output alone."""
        ...


# (query, key, value, out, lse, dout and dlse, if there is one), captured tensors, row_state -> what
# `backward` gives; None where it has to be asked.
BackwardAgain = Callable[
    [tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], "torch.Tensor | None"], "Gradients | None"
]


class NotYet:
    """In place of a shorter way: this call ran as later ones will not, so ask again then."""


NOT_YET = NotYet()


class Again:
    """What is remembered of a call for calls like it; None for a backend that has no shorter way.

    forwards: by (want_max_scores, for_backward). backwards: by the strides of all inputs, which
    those of the forward need not have any more, dout's dtype, and whether there is a row_state.
    """

    __slots__ = ("backwards", "forwards")

    def __init__(self) -> None:
        self.forwards: dict[tuple[bool, bool], ForwardAgain | None] = {}
        self.backwards: dict[tuple[object, ...], BackwardAgain | None] = {}


class Backend(Protocol):
    """Forward and backward of fused attention on one kind of device."""

    name: str

    def unsupported(self, call: AttentionCall) -> str | None:
        """Why this call cannot run here, or None if it can. Cheap: called once a plan."""
        ...

    def forward(self, call: AttentionCall, want_max_scores: bool) -> ForwardResult: ...

    def forward_again(
        self, call: AttentionCall, want_max_scores: bool
    ) -> ForwardAgain | NotYet | None:
        """A shorter way to `forward` for calls like this one, which has run."""
        ...

    def backward(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients: ...

    def backward_again(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> BackwardAgain | None:
        """A shorter way to `backward` for calls like this one, which has run."""
        ...


# name -> module and class; imported when first used, so that one backend never pays for another.
BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("attnloom.backends.cpu.launch", "CpuBackend"),
    "gluon": ("attnloom.backends.gluon.launch", "GluonBackend"),
    "triton": ("attnloom.backends.triton.launch", "TritonBackend"),
    "tiled": ("attnloom.backends.tiled", "TiledBackend"),
}


@functools.cache
def load(name: str) -> Backend:
    """The one instance of a backend of BACKENDS; KeyError if there is no such backend."""
    module, cls = BACKENDS[name]
    with uncollected():
        return getattr(importlib.import_module(module), cls)()
