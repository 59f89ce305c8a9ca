"""Implementations that a problem is run through: the oracle, eager attention, attnloom itself."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attnloom.backends.cpu import launch
from attnloom.backends.reference import evaluate_lanes, reference_attention
from tests.harness.case import Problem

# (out, lse, max_scores); max_scores is None where an implementation does not give it.
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Implementation = Callable[[Problem], Outputs]


def oracle(problem: Problem) -> Outputs:
    """The dense oracle; give it `problem.copy(torch.float64)`."""
    score_mod, mask_mod = problem.mods
    return reference_attention(
        problem.query, problem.key, problem.value, score_mod, mask_mod, problem.case.scale
    )


def eager(problem: Problem) -> Outputs:
    """Attention as one writes it by hand: each operator rounds to the dtype of the inputs."""
    score_mod, mask_mod = problem.mods
    q, k, v = problem.query, problem.key, problem.value
    B, Hq, _, D = q.shape
    group = Hq // k.shape[1] if k.shape[1] else 1
    k, v = (x.to(q.dtype).repeat_interleave(group, 1).expand(B, -1, -1, -1) for x in (k, v))
    scale = 1 / math.sqrt(D) if problem.case.scale is None else problem.case.scale
    scores = q @ k.transpose(-2, -1) * scale
    live = torch.ones_like(scores, dtype=torch.bool)
    if mask_mod is not None:
        flat = evaluate_lanes(mask_mod, *live.nonzero(as_tuple=True))
        live = (flat != 0).view(live.shape)
    if score_mod is not None:
        at = live.nonzero(as_tuple=True)
        kept = evaluate_lanes(score_mod, scores[at], *at).to(q.dtype)
        scores = torch.zeros_like(scores).index_put(at, kept)
    scores = scores.masked_fill(~live, -math.inf)
    if not scores.shape[-1]:
        none = scores.new_full(scores.shape[:-1], -math.inf)
        return scores @ v, none, none
    empty = (scores.detach() == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0), -1).masked_fill(empty[..., 0], -math.inf)
    return weights @ v, lse, scores.detach().amax(-1)


def attnloom_with(device: str = "cpu", **kernel_options: Any) -> Implementation:
    """The public API under these kernel options, on a copy of the problem on another device."""
    return functools.partial(_attnloom, kernel_options=kernel_options, device=device)


def _on(device: str, problem: Problem) -> Problem:
    """The problem there, strides and all; gradients flow back to the tensors here."""

    def move(x: torch.Tensor) -> torch.Tensor:
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return room.copy_(x)

    query, key, value = (move(x) for x in (problem.query, problem.key, problem.value))
    captures = {name: move(x) for name, x in problem.captures.items()}
    return replace(problem, query=query, key=key, value=value, captures=captures)


def _attnloom(problem: Problem, kernel_options: dict[str, Any], device: str) -> Outputs:
    import attnloom

    if device != "cpu":
        problem = _on(device, problem)
    case, s = problem.case, problem.case.sizes
    with torch.device(device):
        score_mod, mask_mod = problem.mods
    block_mask = None
    if mask_mod is not None:
        axes = case.row.mask_axes
        block_mask = attnloom.create_block_mask(
            mask_mod,
            s.B if "b" in axes else None,
            s.Hq if "h" in axes else None,
            s.Q_LEN,
            s.KV_LEN,
            device=device,
            BLOCK_SIZE=case.block_size,
        )
    out, aux = attnloom.flex_attention(
        problem.query,
        problem.key,
        problem.value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=case.scale,
        enable_gqa=s.Hq != s.Hkv,
        kernel_options=kernel_options or None,
        return_aux=attnloom.AuxRequest(lse=True, max_scores=True),
    )
    return tuple(x.to("cpu") for x in (out, aux.lse, aux.max_scores))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch runs on one thread: many small operators wait for each other less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN, so that an element left unwritten shows; so do CPU kernels'
    workspaces, of which the last is kept otherwise."""
    launch._kept.workspace = launch._kept.workspace[:0]
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
