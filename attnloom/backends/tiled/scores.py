"""Scores of one tile: the product, the score_mod, the mask, and their derivative."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall
from attnloom.backends.tiled.tiles import Keys, Part, Rows
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, Program
from attnloom.ir.passes.gradient import Contribution, Gradient, gradient

_differentiate = functools.lru_cache(maxsize=64)(gradient)


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a call.

    product: scale * query @ key^T, [B, Hkv, G, rows, keys]. scores: after the score_mod, -inf where
    the mask hides them. live: where it does not; None if nothing is hidden.
    """

    product: torch.Tensor
    scores: torch.Tensor
    live: torch.Tensor | None
    positions: dict[str, torch.Tensor]

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, zero where the mask hides the score, whatever it holds there."""
        if self.live is None:
            return value
        return torch.where(self.live, value, torch.zeros_like(value))


def score_tile(
    call: AttentionCall, part: Part, rows: Rows, keys: Keys, q: torch.Tensor, k: torch.Tensor
) -> Tile:
    """The tile of q [B, Hkv, G, rows, D] and k [B, Hkv, keys, D]."""
    product = products(q, k.transpose(-2, -1)) * call.scale
    positions = _positions(part, rows, keys, product)
    scores = product
    if call.score is not None:
        (scores,) = interpret(call.score, positions | {"score": product})
        scores = scores.to(product.dtype).expand_as(product)
    live = None
    if keys.partial and call.mask is not None and call.blocks is not None:
        shifted = positions | {
            "q": positions["q"] + call.blocks.q_offset,
            "kv": positions["kv"] + call.blocks.kv_offset,
        }
        (live,) = interpret(call.mask, shifted)
        scores = torch.where(live, scores, -math.inf)
    return Tile(product, scores, live, positions)


def products(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, G, rows, n] @ [B, Hkv, n, m]; the heads of a group share the columns."""
    B, Hkv, G, R, n = rows.shape
    flat = torch.matmul(rows.reshape(B, Hkv, G * R, n), columns)
    return flat.reshape(B, Hkv, G, R, columns.size(-1))


def _positions(part: Part, rows: Rows, keys: Keys, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions of the scores, each along its own dimensions of [B, Hkv, G, rows, keys]."""
    _, kv_heads, group = like.shape[:3]

    def count(start: int, stop: int, *shape: int) -> torch.Tensor:
        return torch.arange(start, stop, device=like.device).reshape(shape)

    return {
        "b": count(part.b0 + part.b_at, part.b1 + part.b_at, -1, 1, 1, 1, 1),
        "h": count(part.h0, part.h1, 1, kv_heads, group, 1, 1),
        "q": count(rows.q0 + part.q_at, rows.q1 + part.q_at, 1, 1, 1, -1, 1),
        "kv": count(keys.k0, keys.k1, 1, 1, 1, 1, -1),
    }


def score_gradient(
    call: AttentionCall, tile: Tile, dscore: torch.Tensor, totals: dict[int, torch.Tensor]
) -> torch.Tensor:
    """dL/d(product) from dL/d(scores); adds gradients of captured tensors to `totals`, by slot."""
    if call.score is None:
        return dscore
    derivative = _differentiate(call.score.program)
    bound = BoundProgram(derivative.program, call.score.tensors, call.score.numbers)
    inputs = tile.positions | {"score": tile.product, "dscore": dscore}
    outputs = interpret(bound, inputs, float64=dscore.dtype is torch.float64)
    values = dict(zip(derivative.program.outputs, outputs, strict=True))
    for item in derivative.contributions:
        _contribute(derivative, item, values, tile, totals[item.slot])
    return tile.keep(outputs[0].to(dscore.dtype).expand_as(dscore))


def gradient_slots(program: Program) -> tuple[int, ...]:
    """Slots of the captured tensors that want a gradient."""
    return tuple(i for i, spec in enumerate(program.tensors) if spec.requires_grad)


def _contribute(
    derivative: Gradient,
    item: Contribution,
    values: dict[int, torch.Tensor],
    tile: Tile,
    total: torch.Tensor,
) -> None:
    """Add one load's share, first summed over the dimensions that its index lacks."""
    if total.numel() == 0:
        return
    program = derivative.program
    inner = len(program.reductions)
    lanes = (*tile.product.shape, *_lengths(derivative, item, values, inner))
    index = [_with_inner(program, i, values[i], inner) for i in item.index]
    value = _with_inner(program, item.value, values[item.value], inner).to(total.dtype)
    live = tile.live
    if live is not None:
        live = live.reshape(*live.shape, *[1] * inner)
        value = torch.where(live, value, torch.zeros_like(value))
    value = value.expand(lanes)
    shape = torch.broadcast_shapes((1,) * len(lanes), *(i.shape for i in index))
    lacking = [d for d, size in enumerate(shape) if size == 1 and lanes[d] != 1]
    if lacking:
        value = value.sum(lacking, keepdim=True)
    if not index:
        total += value.reshape(())
        return
    places = []
    for i, size in zip(index, total.shape, strict=True):
        whole = i.to(torch.int64)
        whole = torch.where(whole < 0, whole + size, whole).clamp(0, size - 1)
        places.append(whole.expand(shape))
    total.index_put_(tuple(places), value, accumulate=True)


def _lengths(
    derivative: Gradient, item: Contribution, values: dict[int, torch.Tensor], inner: int
) -> tuple[int, ...]:
    """Steps of each reduction axis that the contribution varies along, 1 for the others."""
    shapes = [
        values[i].shape[-inner:]
        for i in (*item.index, item.value)
        if inner and derivative.program.axes[i] & ~Axes.ALL
    ]
    return tuple(torch.broadcast_shapes((1,) * inner, *shapes)) if inner else ()


def _with_inner(program: Program, node: int, value: torch.Tensor, inner: int) -> torch.Tensor:
    """The value with one trailing dimension a reduction axis."""
    if program.axes[node] & ~Axes.ALL:
        return value
    return value.reshape([*value.shape, *[1] * inner])
