"""The independent form of a mod, and what must agree with it.

A mask is a Python function of four ints, run once a score; a score_mod is a function of the dense
float64 scores. Neither shares code with attnloom.mods, nor with the tracer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnloom import create_block_mask, create_mask, flex_attention, mods
from tests.harness.agree import close, normal
from tests.masks.test_classify import codes_of, tile_codes

Keeps = Callable[[int, int, int, int], bool]
OnScores = Callable[[torch.Tensor], torch.Tensor]
D = 8
BOTH = ("cpu", "tiled")  # "tiled" compiles nothing; kernels are for what shares none


@dataclass(frozen=True)
class Sizes:
    B: int = 1
    H: int = 1
    Q: int = 40
    KV: int = 40

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.Q, self.KV


def loops(keeps: Keeps, sizes: Sizes) -> torch.Tensor:
    """[B, H, Q, KV] bool, one call a score."""
    places = itertools.product(*map(range, sizes.shape))
    return torch.tensor([bool(keeps(*at)) for at in places], dtype=torch.bool).view(sizes.shape)


def grid(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """b, h, q, kv as tensors that broadcast to [B, H, Q, KV]."""
    B, H, Q, KV = sizes.shape
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    return b, h, torch.arange(Q)[:, None], torch.arange(KV)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor | None,
    on_scores: OnScores | None,
) -> torch.Tensor:
    """softmax(on_scores(q k^T / sqrt(D)), where kept) v in float64; 0 for rows without keys."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    scores = scores if on_scores is None else on_scores(scores)
    if kept is None:
        return torch.softmax(scores, -1) @ v.double()
    empty = ~kept.any(-1, keepdim=True)
    scores = scores.masked_fill(~kept & ~empty, -math.inf)
    return torch.softmax(scores, -1).masked_fill(empty, 0.0) @ v.double()


def check_mask(mask_mod: Any, keeps: Keeps, sizes: Sizes, *backends: str) -> torch.Tensor:
    """Assert that dense mask, block map, values and gradients are those of `keeps`; the mask."""
    kept = loops(keeps, sizes)
    wrong = (create_mask(mask_mod, *sizes.shape) != kept).nonzero()
    assert not len(wrong), f"differs first at (b, h, q, kv) = {tuple(wrong[0].tolist())}"
    block_mask = create_block_mask(mask_mod, *sizes.shape, BLOCK_SIZE=16)
    codes = codes_of(block_mask.lists(), sizes.B, sizes.H)
    assert torch.equal(codes, tile_codes(kept, 16, 16))
    check_attention(None, block_mask, kept, None, sizes, (), *backends)
    return kept


def check_in_one_kernel(cases: Sequence[tuple[Any, Keeps]], sizes: Sizes) -> None:
    """Assert that a kernel of the CPU keeps what each `keeps` does, one mask_mod a head."""
    sizes = replace(sizes, H=len(cases))
    kept = loops(lambda b, h, q, k: cases[h][1](b, 0, q, k), sizes)
    mask_mod = mods.per_head(*(mask_mod for mask_mod, _ in cases))
    block_mask = create_block_mask(mask_mod, *sizes.shape, BLOCK_SIZE=16)
    check_attention(None, block_mask, kept, None, sizes, (), "cpu")


def check_score(
    score_mod: Any,
    on_scores: OnScores,
    sizes: Sizes,
    *backends: str,
    captures: Sequence[torch.Tensor] = (),
    mask: tuple[Any, Keeps] | None = None,
) -> None:
    """Assert that values and all gradients are those of the dense formula.

    backends: default "tiled"; with "cpu gradients" the kernels' gradients are checked too.
    captures: tensors that require grad, which both the mod and the formula use.
    mask: a mask_mod and its independent form.
    """
    kept = block_mask = None
    if mask is not None:
        kept = loops(mask[1], sizes)
        block_mask = create_block_mask(mask[0], *sizes.shape, BLOCK_SIZE=16)
    check_attention(score_mod, block_mask, kept, on_scores, sizes, captures, *backends)


def check_attention(
    score_mod: Any,
    block_mask: Any,
    kept: torch.Tensor | None,
    on_scores: OnScores | None,
    sizes: Sizes,
    captures: Sequence[torch.Tensor],
    *backends: str,
) -> None:
    B, H, Q, KV = sizes.shape
    lengths = (Q, KV, KV)
    q, k, v = (normal(B, H, n, D, seed=i).requires_grad_() for i, n in enumerate(lengths))
    leaves = [q, k, v, *captures]
    expected = attention(q, k, v, kept, on_scores)
    weight = normal(*expected.shape, seed=9)
    wanted = _gradients(expected, weight, leaves)
    for backend in [b for b in backends or ("tiled",) if b in BOTH]:
        options: Any = {"backend": backend}
        out = flex_attention(q, k, v, score_mod, block_mask, kernel_options=options)
        close(out, expected)
        if backend == "cpu" and "cpu gradients" not in backends:
            continue  # the backward of kernels is tested elsewhere, and costs a compile
        for mine, theirs in zip(_gradients(out, weight, leaves), wanted, strict=True):
            close(mine, theirs)


def _gradients(
    out: torch.Tensor, weight: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    found = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
