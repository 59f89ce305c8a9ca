"""Masks as Gluon kernels apply them (backends/gluon/emit_mask.py), by Triton's interpreter, against
the program's meaning: tiles of keys along columns, as in the forward, of queries, as in the
backward, and without edges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attnloom.backends.gluon.emit_mask import emit_mask
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.emit import NEAR, Target
from attnloom.backends.triton.fragments import load_module
from attnloom.backends.triton.layouts import is_narrow_now
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram
from attnloom.ir.passes.bounds import fits_32_bits
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.tracer import trace_mask
from tests.kernels.edge_masks import LENGTH, NAMED, random_mask

ROWS, N = 16, 64
# First queries and keys: of calls, and with offsets of a BlockMask.
CORNERS = [(0, 0), (96, 64), (448, 512)]
OFFSETS = [(-40, 8), (16, -64), (NEAR - 64, NEAR - 96), (64 - NEAR, NEAR - 96)]


@triton.jit
def keep_tile(
    out, args, b, h, q0, k0, limit, HEAD: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    EDGES: tl.constexpr, BODY: tl.constexpr, QX: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    rows, place = tl.arange(0, 16), tl.arange(0, 64)
    head = HEAD(args, b, h)
    if QX == 1:
        q, kv = rows + q0, place + k0
        row = ROW(args, head, b, h, q)
        edges = EDGES(args, head, row, b, h, q, k0, limit, LIMITED)
    else:
        q, kv = place + q0, rows + k0
        row = ROW(args, head, b, h, q)
    column = COLUMN(args, head, b, h, kv)
    if QX == 0:
        edges = EDGES(args, head, column, b, h, kv, q0, limit, LIMITED)
    keep = BODY(args, head, row, column, edges, b, h, q, kv, place, QX, LIMITED)
    at = rows[:, None] * 64 + place[None, :]
    tl.store(out + at, tl.where(keep, 1, 0) + at * 0)


def bound_mask(mask: Any) -> BoundProgram:
    bound = trace_mask(mask, torch.device("cpu"))
    return BoundProgram(simplify(bound.program), bound.tensors, bound.numbers)


def target_for(bound: BoundProgram) -> Target:
    """As fields.mask_target finds it for two batch entries and heads."""
    ends = (-NEAR, NEAR)
    wide = not fits_32_bits(bound, {"b": (0, 2), "h": (0, 2), "q": ends, "kv": ends})
    layouts = (("n" if is_narrow_now(t) else "-") + "---" * t.dim() for t in bound.tensors)
    return Target(wide=wide, near=True, layouts=tuple(layouts))


def check(mask: Any, corners: list[tuple[int, int]], along: Axes) -> None:
    bound = bound_mask(mask)
    made: Any = load_module(emit_mask(bound.program, target_for(bound), along))
    made.bi = SimpleNamespace(scalar=lambda value, _: value)
    parts = tuple(getattr(made, f"mask_{p}") for p in ("head", "row", "column", "edges", "body"))
    args = bind(bound)
    for i, (q0, k0) in enumerate(corners):
        b, h, limit, QX = i % 2, 1 - i % 2, (N, 21, -1)[i % 3], int(along is Axes.KV)
        out = torch.full((ROWS, N), 7, dtype=torch.int32)
        launch: Any = keep_tile[(1,)]
        launch(out, args, b, h, q0, k0, limit, *parts, QX, limit < N)
        rows, columns = torch.arange(ROWS)[:, None], torch.arange(N)[None, :]
        q, kv = (q0 + rows, k0 + columns) if QX else (q0 + columns, k0 + rows)
        (wanted,) = interpret(bound, {"b": torch.tensor(b), "h": torch.tensor(h), "q": q, "kv": kv})
        wanted = wanted.expand(ROWS, N) & (columns <= limit)
        assert torch.equal(out != 0, wanted), (mask.__doc__, q0, k0, limit)


WAYS = {"keys": Axes.KV, "queries": Axes.Q, "no edges": Axes.NONE}


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, along: str) -> None:
    check(NAMED[name], CORNERS + OFFSETS, WAYS[along])


@pytest.mark.parametrize("along", ["keys", "queries"])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.slow)])
def test_random(seeds: range, along: str) -> None:
    for seed in seeds:
        check(random_mask(seed), CORNERS[1:] + OFFSETS[seed % 4 :][:1], WAYS[along])


def test_lengths_are_those_of_what_is_captured() -> None:
    assert max(max(corner) for corner in CORNERS) + N <= LENGTH
