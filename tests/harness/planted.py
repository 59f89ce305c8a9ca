"""A tiled implementation in torch operators that can be given a bug on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnloom.backends.reference import evaluate_lanes
from tests.harness.case import Problem
from tests.harness.implementations import Outputs


@dataclass(frozen=True)
class Bugs:
    """What to get wrong; the default is an honest implementation.

    score_gain: factor on every score, before the score_mod.
    out_gain: factor on out.
    accumulator: dtype of the running sums over key tiles; None is that of the softmax.
    key_shift: keys by which the mask is off.
    skipped_tile: number of a tile of TILE keys that is left out.
    capture_gain, key_gain: factors on gradients, captured and of key.
    lse_base_2: lse in units of log2.
    """

    score_gain: float = 1.0
    out_gain: float = 1.0
    accumulator: torch.dtype | None = None
    key_shift: int = 0
    skipped_tile: int | None = None
    capture_gain: float = 1.0
    key_gain: float = 1.0
    lse_base_2: bool = False


TILE = 16


def tiled(bugs: Bugs):
    """An implementation with online softmax in float32 (float64 for float64), and these bugs. It
    rounds gradients of scores to the dtype of the inputs, as kernels do for matrix products."""

    def implementation(problem: Problem) -> Outputs:
        work = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
        sums = bugs.accumulator or work
        scores = _scores(problem, bugs, work)
        v = problem.value.to(work).repeat_interleave(
            problem.case.sizes.Hq // problem.case.sizes.Hkv, 1
        )
        m_i = scores.new_full((*scores.shape[:3], 1), -math.inf)
        l_i, acc = torch.zeros_like(m_i), v.new_zeros(*scores.shape[:3], v.shape[-1], dtype=sums)
        for number, start in enumerate(range(0, scores.shape[-1], TILE)):
            if number == bugs.skipped_tile:
                continue
            tile = scores[..., start : start + TILE]
            m_new = torch.maximum(m_i, tile.detach().amax(-1, keepdim=True))
            shift = torch.where(m_new == -math.inf, 0.0, m_new)
            decay, p = torch.exp(m_i - shift), torch.exp(tile - shift)
            l_i = l_i * decay + p.sum(-1, keepdim=True)
            update = p @ v[:, :, start : start + TILE]
            acc = (acc.to(work) * decay + update).to(sums)
            m_i = m_new
        empty = m_i == -math.inf
        total = torch.where(empty, 1.0, l_i)
        out = bugs.out_gain * acc.to(work) / total
        lse = torch.where(empty, -math.inf, torch.log(total) + m_i)[..., 0]
        lse = lse / math.log(2) if bugs.lse_base_2 else lse
        return out.to(problem.query.dtype), lse, m_i[..., 0].detach()

    return implementation


def _scores(problem: Problem, bugs: Bugs, work: torch.dtype) -> torch.Tensor:
    captures = {name: _with_gain(x, bugs.capture_gain) for name, x in problem.captures.items()}
    score_mod, mask_mod = problem.case.row.build(captures, problem.case.sizes)
    s = problem.case.sizes
    key = _with_gain(problem.key, bugs.key_gain)
    k = key.to(work).repeat_interleave(s.Hq // s.Hkv, 1)
    scores = problem.query.to(work) @ k.transpose(-2, -1) / math.sqrt(s.D) * bugs.score_gain
    if scores.requires_grad:
        scores.register_hook(lambda dscore: dscore.to(problem.query.dtype).to(work))
    at = torch.ones_like(scores, dtype=torch.bool).nonzero(as_tuple=True)
    if mask_mod is not None:
        kept = evaluate_lanes(mask_mod, *at[:3], at[3] - bugs.key_shift)
        at = tuple(index[kept] for index in at)
    picked = scores[at]
    if score_mod is not None:
        picked = evaluate_lanes(score_mod, picked, *at).to(work)
    return torch.full_like(scores, -math.inf).index_put(at, picked)


def _with_gain(tensor: torch.Tensor, gain: float) -> torch.Tensor:
    """The same values, with a gradient that is off by a factor."""
    if not tensor.requires_grad or gain == 1.0:
        return tensor
    return tensor.detach() * (1 - gain) + tensor * gain
