"""Fused attention's algorithm written in torch operators, tile by tile, on any device.

No more than a few tiles of scores exist at a time, so that memory stays linear in the sequence
length: online softmax forward (Milakov and Gimelshein 2018, arXiv:1805.02867), recomputation
backward (Dao et al. 2022, arXiv:2205.14135). Mods run in the interpreter of the IR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from attnloom.backends.registry import AttentionCall, ForwardResult, Gradients
from attnloom.backends.tiled.scores import (
    gradient_slots,
    products,
    score_gradient,
    score_tile,
)
from attnloom.backends.tiled.sequences import sequences
from attnloom.backends.tiled.tiles import Part, Rows, key_slices, parts, query_rows, rows
from attnloom.plan.problem import compute_type


class TiledBackend:
    """See `registry.Backend`; supports every call."""

    name = "tiled"

    def unsupported(self, call: AttentionCall) -> str | None:
        return None

    @torch.no_grad()
    def forward(self, call: AttentionCall, want_max_scores: bool) -> ForwardResult:
        query, value = call.query, call.value
        shape, real = query.shape[:3], _real(call)
        out = query.new_zeros(*shape, value.size(3))
        lse = query.new_full(shape, -math.inf, dtype=real)
        max_scores = torch.full_like(lse, -math.inf)
        results = (out, lse, max_scores)
        all_of_it = (call, (0, 0), (0, 0))
        for one, at, offsets in [all_of_it] if call.table is None else sequences(call):
            for part in parts(one):
                part = replace(part, b_at=offsets[0], q_at=offsets[1])
                for tile_rows in rows(one, part):
                    _forward_rows(one, part, tile_rows, [t[at[0] :, :, at[1] :] for t in results])
        return ForwardResult(out, lse, max_scores if want_max_scores else None)

    def forward_again(self, call: AttentionCall, want_max_scores: bool) -> None:
        return None

    def backward_again(self, call: AttentionCall, *given: torch.Tensor | None) -> None:
        return None

    @torch.no_grad()
    def backward(
        self,
        call: AttentionCall,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        real = _real(call)
        totals = [torch.zeros_like(t, dtype=real) for t in (call.query, call.key, call.value)]
        captured: dict[int, torch.Tensor] = {}
        if call.score is not None:
            for slot in gradient_slots(call.score.program):
                shape = call.score.tensors[slot].shape
                captured[slot] = call.query.new_zeros(shape, dtype=real)
        dlse = torch.zeros_like(lse, dtype=real) if dlse is None else dlse.to(real)
        delta = (out.to(real) * dout.to(real)).sum(-1) - dlse
        walk = _Backward(call, (lse.to(real), dout, dlse, delta), totals, captured)
        for part in parts(call):
            for tile_rows in rows(call, part):
                walk.rows(part, tile_rows)
        dq, dk, dv = (
            t.to(x.dtype) for t, x in zip(totals, (call.query, call.key, call.value), strict=True)
        )
        tensors = () if call.score is None else call.score.tensors
        found = (captured[i].to(t.dtype) if i in captured else None for i, t in enumerate(tensors))
        return Gradients(dq, dk, dv, tuple(found))


def _real(call: AttentionCall) -> torch.dtype:
    return compute_type(call.query.dtype, call.key.dtype, call.value.dtype).torch


def _forward_rows(
    call: AttentionCall,
    part: Part,
    tile_rows: Rows,
    results: Sequence[torch.Tensor],
) -> None:
    real = _real(call)
    batch, heads = key_slices(call, part)
    kv_heads = heads.stop - heads.start
    q = query_rows(call.query, part, kv_heads, tile_rows).to(real)
    m = q.new_full(q.shape[:4], -math.inf)  # running maximum, [B, Hkv, G, rows]
    total = q.new_zeros(q.shape[:4])
    acc = q.new_zeros(*q.shape[:4], call.value.size(3))
    for keys in tile_rows.keys:
        k, v = (t[batch, heads, keys.k0 : keys.k1].to(real) for t in (call.key, call.value))
        tile = score_tile(call, part, tile_rows, keys, q, k)
        higher = torch.maximum(m, tile.scores.amax(-1))
        # A row without a key so far has maximum -inf, and -inf - -inf is no number.
        base = torch.where(higher == -math.inf, 0.0, higher)
        weights = torch.exp(tile.scores - base.unsqueeze(-1))
        fade = torch.exp(m - base)
        total = total * fade + weights.sum(-1)
        acc = acc * fade.unsqueeze(-1) + products(weights, v)
        m = higher
    empty = total == 0
    normal = acc / torch.where(empty, 1.0, total).unsqueeze(-1)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    for whole, piece in zip(results, (normal, lse, m), strict=True):
        target = whole[part.b0 : part.b1, part.h0 : part.h1, tile_rows.q0 : tile_rows.q1]
        target.copy_(piece.reshape(target.shape))


class _Backward:
    """Gradients of a call, added up over row tiles.

    of_rows: lse, dout, dlse and delta = rowsum(out * dout) - dlse. totals: of query, key, value.
    """

    def __init__(
        self,
        call: AttentionCall,
        of_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        totals: list[torch.Tensor],
        captured: dict[int, torch.Tensor],
    ) -> None:
        self.call = call
        self.lse, self.dout, self.dlse, self.delta = of_rows
        self.dq, self.dk, self.dv = totals
        self.captured = captured

    def rows(self, part: Part, tile_rows: Rows) -> None:
        call, real = self.call, self.dq.dtype
        batch, heads = key_slices(call, part)
        kv_heads = heads.stop - heads.start
        q, dout, lse, dlse, delta = (
            query_rows(t, part, kv_heads, tile_rows).to(real)
            for t in (call.query, self.dout, self.lse, self.dlse, self.delta)
        )
        dq = torch.zeros_like(q)
        for keys in tile_rows.keys:
            at = (batch, heads, slice(keys.k0, keys.k1))
            k, v = call.key[at].to(real), call.value[at].to(real)
            tile = score_tile(call, part, tile_rows, keys, q, k)
            # A row without keys has lse -inf; its scores are -inf too.
            base = torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)
            weights = torch.exp(tile.scores - base)
            dweights = products(dout, v.transpose(-2, -1))
            shift = delta
            if len(tile_rows.keys) == 1:
                # sum(out * dout) from the tile itself: with one key it cancels dweights exactly.
                shift = (weights * dweights).sum(-1) - dlse
            dscore = weights * (dweights - shift.unsqueeze(-1))
            dproduct = score_gradient(call, tile, tile.keep(dscore), self.captured) * call.scale
            dq += products(dproduct, k)
            _add_keys(self.dk[at], dproduct, q)
            _add_keys(self.dv[at], weights, dout)
        target = self.dq[part.b0 : part.b1, part.h0 : part.h1, tile_rows.q0 : tile_rows.q1]
        target.copy_(dq.reshape(target.shape))


def _add_keys(total: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """total [Bkv, Hkv, keys, n] += weights^T @ rows, over group and rows, and over the batch where
    all entries share their keys."""
    B, Hkv, G, R, C = weights.shape
    flat = weights.reshape(B, Hkv, G * R, C).transpose(-2, -1) @ rows.reshape(B, Hkv, G * R, -1)
    total += flat.sum(0, keepdim=True) if total.size(0) == 1 and B != 1 else flat
