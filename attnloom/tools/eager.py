"""Attention as one writes it by hand: every operator rounds to the dtype of the inputs.

Its distance from the float64 oracle is what that dtype costs anyone; the error budget of
`budget.py` is a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from attnloom.backends.reference import evaluate_lanes
from attnloom.tools.setting import Mod

_DRAWS = 4


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    on_dscore: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Q_LEN, D] and lse [B, Hq, Q_LEN] in query's dtype; every score in memory.

    on_dscore: changes the gradient of the modified scores, [live scores], on its way to the mod.
    """
    group = query.size(1) // key.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ k.transpose(-2, -1) / math.sqrt(query.size(-1))
    live = torch.ones_like(scores, dtype=torch.bool)
    if mask_mod is not None:
        live = (evaluate_lanes(mask_mod, *live.nonzero(as_tuple=True)) != 0).view(live.shape)
    if score_mod is not None:
        at = live.nonzero(as_tuple=True)
        kept = evaluate_lanes(score_mod, scores[at], *at).to(query.dtype)
        if on_dscore is not None and kept.requires_grad:
            kept.register_hook(on_dscore)
        scores = torch.zeros_like(scores).index_put(at, kept)
    scores = scores.masked_fill(~live, -math.inf)
    empty = (scores.detach() == -math.inf).all(-1, keepdim=True)
    filled = scores.masked_fill(empty, 0)
    weights = torch.softmax(filled, -1).masked_fill(empty, 0)
    lse = torch.logsumexp(filled, -1).masked_fill(empty[..., 0], -math.inf)
    return weights @ v, lse


def sizes_without_cancellation(
    inputs: Sequence[torch.Tensor],
    mods: tuple[Mod | None, Mod | None],
    captured: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """How large captured gradients would be if the terms that they sum had random signs.

    A gradient is a sum over scores, and rounding goes by the size of its terms, not of their sum:
    where they cancel, the sum says nothing about the error that a kernel may make. With random
    signs it is about the root of the sum of the squares of the terms, whatever they cancel.

    Args:
        inputs, captured: query, key, value and what the mods capture, float64.
        weights: gradients of out and lse.
    Returns:
        For each captured tensor a root mean square over a few draws, in its shape.
    """
    draw = torch.Generator().manual_seed(0)

    def signed(dscore: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, dscore.shape, generator=draw, device="cpu")
        return dscore * (signs.to(dscore) * 2 - 1)

    query, key, value = inputs
    results = eager_attention(query, key, value, *mods, on_dscore=signed)
    squares = [torch.zeros_like(x) for x in captured]
    for _ in range(_DRAWS):
        grads = torch.autograd.grad(
            results, list(captured), list(weights), allow_unused=True, retain_graph=True
        )
        for total, grad in zip(squares, grads, strict=True):
            if grad is not None:
                total += grad**2
    return [(total / _DRAWS).sqrt() for total in squares]
