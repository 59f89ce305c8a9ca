"""Elements in pieces (backends/gluon/pieces.py): what the emitted functions read, and where they
store, by Triton's interpreter. Layouts are the compiler's alone, and are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attnloom.backends.gluon.emit import emit_score
from attnloom.backends.gluon.emit_grad import GradWriter
from attnloom.backends.triton.arguments import bind
from attnloom.backends.triton.emit import Target
from attnloom.backends.triton.emit_grad import Sinks, gradient_of
from attnloom.backends.triton.fragments import load_module
from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.tracer import trace_score

ROWS, N = 64, 128
B, H, Q_LEN, KV_LEN = 2, 4, 150, 208
CORNERS = [(0, 0), (64, 128), (128, 128)]  # the last ones overhang the tensor


def _positions(q, kv, columns, QX, *_):
    rows, across = tl.arange(0, ROWS)[:, None], tl.arange(0, columns)[None, :]
    return (q + rows, kv + across) if QX == 1 else (q + across, kv + rows)


STAND_IN = SimpleNamespace(
    positions=_positions,
    spread=lambda pieces, *_: pieces,
    gathered=lambda value, QX, dtype, _: value.to(dtype),
)


@triton.jit
def read(out, args, b, h, q, kv, HEAD: tl.constexpr, PIECES: tl.constexpr, QX: tl.constexpr):
    found = PIECES(args, HEAD(args, b, h), b, h, q, kv, 128, QX)
    at = tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, found[0])


@triton.jit
def leave(values, args, sinks, b, h, q, kv, LEAVE: tl.constexpr, QX: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    LEAVE(args, sinks, q, kv, b, h, tl.load(values + at), QX)


def bound_bias(bias: torch.Tensor) -> BoundProgram:
    bound = trace_score(
        lambda s, b, h, q, kv: s + bias[b, h, q, kv], DType.F32, torch.device("cpu")
    )
    return BoundProgram(simplify(bound.program, False), bound.tensors, bound.numbers)


def target_of(wide: bool) -> Target:
    return Target(wide=wide, layouts=("--v--v--v--1m",))


def tile_of(table: torch.Tensor, corner: tuple[int, int], QX: int) -> torch.Tensor:
    """A tile of [Q_LEN, KV_LEN] in the shape of scores; the last row again past the end, zeros past
    the last key."""
    rows, keys = (ROWS, N) if QX == 1 else (N, ROWS)
    q = (corner[0] + torch.arange(rows)).clamp(max=table.size(0) - 1)
    kv = corner[1] + torch.arange(keys)
    inside = kv < table.size(1)
    found = torch.where(inside, table[q][:, kv.clamp(max=table.size(1) - 1)], 0)
    return found if QX == 1 else found.T


def installed(module: Any) -> Any:
    module.pc = STAND_IN
    return module


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("QX", [0, 1])
def test_what_is_read(QX: int, wide: bool) -> None:
    """Rows with room behind them, as a padded table has."""
    draw = torch.Generator().manual_seed(0)
    bias = torch.randn(B, H, Q_LEN, KV_LEN + 16, generator=draw)[..., :KV_LEN]
    bound = bound_bias(bias)
    module = installed(load_module(emit_score(bound.program, target_of(wide))))
    for corner in CORNERS:
        out = torch.full((ROWS, N), torch.nan)
        read[(1,)](out, bind(bound), 1, 2, *corner, module.score_head, module.score_pieces, QX)
        torch.testing.assert_close(out, tile_of(bias[1, 2], corner, QX), rtol=0, atol=0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("QX", [0, 1])
def test_where_gradients_are_stored(QX: int, wide: bool) -> None:
    bias = torch.zeros(B, H, Q_LEN, KV_LEN, requires_grad=True)
    bound = bound_bias(bias)
    found = gradient_of(bound.program, False)
    writer = GradWriter(
        found.program, "sinks", target_of(wide), found.contributions, Sinks((True,))
    )
    module = installed(load_module(writer.module()))
    draw = torch.Generator().manual_seed(0)
    for corner in CORNERS:
        values = torch.randn(ROWS, N, generator=draw)
        grad = torch.full((B, H, Q_LEN, KV_LEN), torch.nan)
        leave[(1,)](values, bind(bound), (grad,), 1, 2, *corner, module.sinks_leave0, QX)
        mine = values if QX == 1 else values.T
        rows, keys = min(mine.size(0), Q_LEN - corner[0]), min(mine.size(1), KV_LEN - corner[1])
        expected = torch.full_like(grad, torch.nan)
        expected[1, 2, corner[0] :, corner[1] :][:rows, :keys] = mine[:rows, :keys]
        torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
