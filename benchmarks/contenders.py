"""Implementations of attention that a benchmark can run, ours and peers, each at its best setting.

Masks, dense biases and BlockMasks are prepared before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

import attnloom
from benchmarks.cases import VARIANTS, Case

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation.

    prepare: case -> attention(query, key, value), or None where it cannot express the case.
    has_backward: whether it can differentiate on the CPU.
    """

    name: str
    prepare: Callable[[Case], Attention | None]
    has_backward: bool = True


def dense_mask(case: Case) -> torch.Tensor | None:
    """[1, 1, q_len, kv_len] bool, or None where every key is seen."""
    variant = VARIANTS[case.variant]
    if variant.mask is None:
        return None
    return variant.mask(case.kv_len)(0, 0, *_positions(case))[None, None]


def density(case: Case) -> float:
    """Share of scores that the mask keeps."""
    mask = dense_mask(case)
    return 1.0 if mask is None else float(mask.float().mean())


def _positions(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None, :]


def _flex(module: Any, case: Case, **extra: Any) -> Attention:
    """flex_attention of attnloom or torch, which take the same arguments."""
    variant = VARIANTS[case.variant]
    flex_attention = extra.pop("function", module.flex_attention)
    score_mod = variant.score(case.num_heads) if variant.score else None
    block_mask = None
    if variant.mask:
        block_mask = module.create_block_mask(
            variant.mask(case.kv_len), None, None, case.q_len, case.kv_len, device="cpu"
        )
    enable_gqa = case.num_heads != case.num_kv_heads

    def attention(query, key, value):
        return flex_attention(
            query, key, value, score_mod, block_mask, enable_gqa=enable_gqa, **extra
        )

    return attention


def _attnloom(case: Case) -> Attention:
    return _flex(attnloom, case)


def _attnloom_tiled(case: Case) -> Attention:
    return _flex(attnloom, case, kernel_options={"backend": "tiled"})


def _torch_flex_compiled(case: Case) -> Attention:
    torch.compiler.reset()  # one graph a case: no recompilation limit is met
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    return _flex(torch_flex, case, function=compiled)


def _torch_flex_eager(case: Case) -> Attention:
    return _flex(torch_flex, case)


def _sdpa(case: Case) -> Attention | None:
    variant = VARIANTS[case.variant]
    if not variant.additive:
        return None
    is_causal = variant.is_causal and variant.score is None
    mask = None if is_causal else _dense_bias(case)
    enable_gqa = case.num_heads != case.num_kv_heads

    def attention(query, key, value):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa
        )

    return attention


def _dense_bias(case: Case) -> torch.Tensor | None:
    """[1, 1 or Hq, q_len, kv_len] float32: what the score_mod adds, -inf where masked.

    SDPA converts a bool mask on every call, at twice the time of a float one; and a bias in
    bfloat16 would be wrong by whole units at a distance of thousands.
    """
    variant = VARIANTS[case.variant]
    mask = dense_mask(case)
    if variant.score is None:
        return None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    heads = torch.arange(case.num_heads)[:, None, None]
    bias = variant.score(case.num_heads)(0.0, 0, heads, *_positions(case))[None].float()
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)


def _math(case: Case) -> Attention:
    """Eager torch operators, every score in memory.

    Products are in the inputs' dtype, scores and softmax in float32: a bfloat16 score of ALiBi at
    4,096 keys would be off by whole units.
    """
    variant = VARIANTS[case.variant]
    mask = dense_mask(case)
    score_mod = variant.score(case.num_heads) if variant.score else None
    heads = torch.arange(case.num_heads)[:, None, None]
    group = case.num_heads // case.num_kv_heads

    def attention(query, key, value):
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = (query @ key.transpose(-2, -1)).float() / math.sqrt(case.head_dim)
        if score_mod is not None:
            scores = score_mod(scores, 0, heads, *_positions(case))
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return torch.softmax(scores, dim=-1).to(value.dtype) @ value

    return attention


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("attnloom", _attnloom),
        Contender("attnloom-tiled", _attnloom_tiled),
        Contender("torch-flex", _torch_flex_compiled, has_backward=False),
        Contender("torch-flex-eager", _torch_flex_eager, has_backward=False),
        Contender("sdpa", _sdpa),
        Contender("math", _math),
    )
}
DEFAULT_PEERS = ("torch-flex", "sdpa", "math")
