"""Attention as plain differentiable torch operators, for derivatives that no kernel computes.

Used for forward-mode derivatives (torch.func.jvp, jacfwd, dual numbers) and for the backward of
the backward. It interprets the same traced programs that the kernels were emitted from and works
on chunks of query rows: nothing of Q_LEN x KV_LEN elements is allocated unless autograd itself is
asked to keep the graph for a third derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from attnloom.api import autocast
from attnloom.api.launch import Launch
from attnloom.api.token_map import live_scores, positions, row_chunks
from attnloom.backends.registry import AttentionCall
from attnloom.ir.interpret import interpret
from attnloom.plan.problem import compute_type

Tensors = tuple[torch.Tensor, ...]


def attend(
    launch: Launch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_scores of a launch, by differentiable torch operators."""
    with autocast.switched_off(query):
        parts = [
            _attend_rows(launch.call(query[:, :, a:b], key, value, tensors), a)
            for a, b in row_chunks(query, key.size(2))
        ]
        if not parts:
            parts = [_attend_rows(launch.call(query, key, value, tensors), 0)]
        out, lse, max_scores = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out, lse, max_scores.detach()


def second_order(
    launch: Launch,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors],
    dout: torch.Tensor,
    dlse: torch.Tensor,
    cotangents: Tensors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors, torch.Tensor, torch.Tensor]:
    """Vector-Jacobian product of the backward.

    Args:
        inputs: query, key, value and the captured tensors of score and mask.
        dout, dlse: what the backward was given.
        cotangents: gradients with respect to the backward's results: dq, dk, dv and one for each
            slot of launch.grad_slots().
    Returns:
        gradients with respect to query, key, value, the differentiable captured tensors, dout
        and dlse. They carry a graph of their own when the arguments do.
    """
    query, key, value, tensors = inputs
    slots = launch.grad_slots()
    floats = tuple(tensors[i] for i in slots)
    by_row: list[Tensors] = []
    shared: Tensors | None = None  # of key, value and captured tensors: summed over chunks
    with autocast.switched_off(query):
        for a, b in row_chunks(query, key.size(2)):
            rows = slice(a, b)
            dq, dk, dv, *captured = cotangents
            gq, gk, gv, gfloats, gdout, gdlse = _pull_back(
                _backward_of_rows(launch, tensors, a),
                (query[:, :, rows], key, value, floats, dout[:, :, rows], dlse[:, :, rows]),
                (dq[:, :, rows], dk, dv, tuple(captured)),
            )
            by_row.append((gq, gdout, gdlse))
            part = (gk, gv, *gfloats)
            shared = part if shared is None else tuple(map(torch.add, shared, part))
    if shared is None:
        zeros = tuple(torch.zeros_like(x) for x in (key, value, *floats))
        by_row, shared = [(query * 0, dout * 0, dlse * 0)], zeros
    gq, gdout, gdlse = (torch.cat(part, 2) for part in zip(*by_row, strict=True))
    return gq, shared[0], shared[1], shared[2:], gdout, gdlse


def _pull_back(function: Callable[..., Any], inputs: tuple[Any, ...], cotangents: Any) -> Any:
    """Vector-Jacobian product; a function, so that a chunk's graph is gone before the next."""
    return torch.func.vjp(function, *inputs)[1](cotangents)


def _backward_of_rows(launch: Launch, tensors: Tensors, start: int) -> Callable[..., object]:
    """(q, k, v, floats, dout, dlse) -> (dq, dk, dv, dfloats) for query rows from `start` on."""
    slots = launch.grad_slots()

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, floats: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bound = list(tensors)
        for slot, tensor in zip(slots, floats, strict=True):
            bound[slot] = tensor
        call = launch.call(query, key, value, tuple(bound))
        return _attend_rows(call, start)[:2]

    def backward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        floats: Tensors,
        dout: torch.Tensor,
        dlse: torch.Tensor,
    ) -> object:
        return _pull_back(forward, (query, key, value, floats), (dout, dlse))

    return backward


def _attend_rows(
    call: AttentionCall, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, max_scores for the query rows in `call`, whose first is row `start`."""
    query, key, value = call.query, call.key, call.value
    real = compute_type(query.dtype, key.dtype, value.dtype).torch
    batch, heads, rows, head_dim = query.shape
    key_heads, keys = key.size(1), key.size(2)
    packed = (batch, key_heads, heads // max(1, key_heads) * rows)

    q = query.to(real).reshape(*packed, head_dim)
    # [B, Hkv, G * rows, KV_LEN] -> [B, Hq, rows, KV_LEN]
    scores = (q @ key.to(real).transpose(-2, -1) * call.scale).reshape(batch, heads, rows, keys)
    at = positions(query, keys, start)
    if call.score is not None:
        scores = interpret(call.score, {"score": scores, **at})[0].to(real).expand(scores.shape)
    live = live_scores(call, at)
    if live is not None:
        scores = torch.where(live, scores, -math.inf)
    if keys == 0:
        m_i = scores.new_full((batch, heads, rows), -math.inf)
    else:
        m_i = scores.detach().amax(-1)
    shift = torch.where(m_i == -math.inf, 0.0, m_i)
    weights = torch.exp(scores - shift[..., None])
    l_i = weights.sum(-1)
    empty = l_i == 0
    l_i = torch.where(empty, 1.0, l_i)
    lse = torch.where(empty, -math.inf, torch.log(l_i) + shift)
    weights = (weights / l_i[..., None]).reshape(*packed, keys)
    out = (weights @ value.to(real)).reshape(batch, heads, rows, value.size(3))
    return out.to(query.dtype), lse, m_i
