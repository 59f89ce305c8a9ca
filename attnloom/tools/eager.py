"""Attention as one writes it by hand: every operator rounds to the dtype of the inputs.

Its distance from the float64 oracle is what that dtype costs anyone; the error budget of
`budget.py` is a multiple of it.
"""

from __future__ import annotations

import math

import torch

from attnloom.backends.reference import evaluate_lanes
from attnloom.tools.setting import Mod


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Q_LEN, D] and lse [B, Hq, Q_LEN] in query's dtype; every score in memory."""
    group = query.size(1) // key.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ k.transpose(-2, -1) / math.sqrt(query.size(-1))
    live = torch.ones_like(scores, dtype=torch.bool)
    if mask_mod is not None:
        live = (evaluate_lanes(mask_mod, *live.nonzero(as_tuple=True)) != 0).view(live.shape)
    if score_mod is not None:
        at = live.nonzero(as_tuple=True)
        kept = evaluate_lanes(score_mod, scores[at], *at).to(query.dtype)
        scores = torch.zeros_like(scores).index_put(at, kept)
    scores = scores.masked_fill(~live, -math.inf)
    empty = (scores.detach() == -math.inf).all(-1, keepdim=True)
    filled = scores.masked_fill(empty, 0)
    weights = torch.softmax(filled, -1).masked_fill(empty, 0)
    lse = torch.logsumexp(filled, -1).masked_fill(empty[..., 0], -math.inf)
    return weights @ v, lse
