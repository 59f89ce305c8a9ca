"""Fragments of Gluon kernels: how a user's mods enter them.

    head(args, b, h) -> tuple                   what depends on b and h: scalars
    row(args, head, b, h, q) -> tuple           what depends on q: q and values are vectors
    column(args, head, b, h, kv) -> tuple       what depends on kv: likewise
    pieces(args, head, b, h, q, kv, N, QX) -> tuple of what each score has to itself: q and kv are
                                                the first ones of a tile [64, N] (pieces.py)
    body(args, head, row, column, b, h, q, kv, pieces, score, QX) -> score
                                                the rest, of the shape and layout of the scores

Masks have no pieces, and edges (emit_mask.py) of the rows of a tile, which the position along
columns is compared with: `kv`, or `q` where scores are transposed. For `kv` they are

    edges(args, head, row, b, h, q, first, limit, LIMITED) -> tuple of values a row, less `first`:
                                                the position of the tile's first column
    body(args, head, row, column, edges, b, h, q, kv, place, QX, LIMITED) -> bool
                                                place: columns from 0 on, a vector

and for `q` with q and kv, row and column changed about. LIMITED: columns after `limit` are none.

`args` is what `backends.triton.arguments.bind` makes of a bound program. Scores have a layout L of
two dimensions; QX is the axis that a vector of queries gains to become one of them:

    scores [queries, keys]   QX = 1   q in SliceLayout(1, L), kv in SliceLayout(0, L)
    scores [keys, queries]   QX = 0   q in SliceLayout(0, L), kv in SliceLayout(1, L)

q and kv are passed as vectors everywhere; `body` expands them and what `row` and `column` gave. Any
of the tuples may be taken once and used for many tiles: `head` for a pair (b, h), `row` for a tile
of queries, `column` for one of keys. All functions are elementwise but for
loads by pointers and, within a warp, pieces, so that they run in any warp, on vectors in any
layout. They are `triton.jit` functions, which Gluon compiles with its own semantics; a tuple
without values has one element that is never used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from triton.runtime.jit import JITFunction

from attnloom.backends.gluon import emit
from attnloom.backends.gluon.emit import gluon_module
from attnloom.backends.gluon.emit_mask import MaskWriter
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.fragments import load_module
from attnloom.ir.node import Axes, Program

MASK_PARTS = ("head", "row", "column", "edges", "body")
SCORE_PARTS = ("head", "row", "column", "pieces", "body")


@dataclass(frozen=True, slots=True)
class Fragment:
    """The jit functions of one mod; pieces: of a score_mod alone, edges: of a mask_mod.
    joins: what `body` gives may be several conditions."""

    head: JITFunction
    row: JITFunction
    column: JITFunction
    body: JITFunction
    pieces: JITFunction | None = None
    edges: JITFunction | None = None
    joins: bool = False

    def fields(self, prefix: str) -> dict[str, Any]:
        """Fields SCORE_HEAD, SCORE_ROW ... (or MASK_*) of a kernel's configuration."""
        parts = (*MASK_PARTS, "joins") if self.pieces is None else SCORE_PARTS
        return {f"{prefix}_{part.upper()}": getattr(self, part) for part in parts}


@functools.lru_cache(maxsize=1024)
def score_fragment(program: Program, target: Target) -> Fragment:
    return _fragment("score", SCORE_PARTS, emit.emit_score(program, target))


@dataclass(frozen=True, slots=True)
class Bias:
    """A bias that is linear in the positions, see score_form.py.

    head(args, b, h) -> tuple; slope(args, head, b, h) -> a scalar, what it grows by from key to
    key; at(args, head, b, h, q, kv) -> its values, for a vector of queries and one key.
    """

    head: JITFunction
    slope: JITFunction
    at: JITFunction

    def fields(self) -> dict[str, Any]:
        """Fields BIAS_HEAD, BIAS_SLOPE and BIAS_AT of a kernel's configuration."""
        return {"BIAS_HEAD": self.head, "BIAS_SLOPE": self.slope, "BIAS_AT": self.at}


@functools.lru_cache(maxsize=1024)
def bias_fragment(program: Program, target: Target) -> Bias:
    module = load_module(emit.emit_bias(program, target))
    return Bias(module.bias_head, module.bias_slope, module.bias_at)


@functools.lru_cache(maxsize=1024)
def mask_fragment(program: Program, target: Target, along: Axes) -> Fragment:
    """along: see emit_mask.py."""
    writer = MaskWriter(program, target, along)
    found = _fragment("mask", MASK_PARTS, gluon_module(*writer.functions()))
    return replace(found, joins=writer.joins)


def _fragment(prefix: str, parts: tuple[str, ...], text: str) -> Fragment:
    module = load_module(text)
    return Fragment(**{part: getattr(module, f"{prefix}_{part}") for part in parts})
