"""Compare one hand-written call of the public API with the oracle, where no Case describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import attnloom
from attnloom.backends.reference import reference_attention
from tests.harness.implementations import one_thread

TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 3e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
Mod = Callable[..., Any]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same numbers on whatever torch's default device is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def qkv(
    B: int, H: int, S: int, D: int, *, keys: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [B, H, S, D], key and value [B, H, keys or S, D], leaves that require grad."""
    lengths = (S, keys or S, keys or S)
    made = [normal(B, H, n, D, dtype=dtype, seed=i) for i, n in enumerate(lengths)]
    q, k, v = (x.requires_grad_() for x in made)
    return q, k, v


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within TOLERANCE of the dtype, relative to the largest element; same infinities."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    finite = expected.detach()[torch.isfinite(expected)].abs()
    size = max(float(finite.max()), 1.0) if finite.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * size
    )


def agrees(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    block_mask: Any = None,
    captures: Sequence[torch.Tensor] = (),
    **options: Any,
) -> None:
    """Assert that out, lse and gradients of attnloom.flex_attention are those of the oracle.

    block_mask: passed to attnloom; built from mask_mod over all batches and heads if None. The
        oracle always works from mask_mod.
    captures: tensors, beside those of q, k and v that require grad, to compare gradients of.
    """
    if block_mask is None and mask_mod is not None:
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        block_mask = attnloom.create_block_mask(mask_mod, *sizes, device=q.device)
    out, aux = attnloom.flex_attention(
        q, k, v, score_mod, block_mask, return_aux=attnloom.AuxRequest(lse=True),
        enable_gqa=q.shape[1] != k.shape[1], **options,
    )  # fmt: skip
    with one_thread():
        expected, lse, _ = reference_attention(q, k, v, score_mod, mask_mod, options.get("scale"))
    close(out, expected)
    close(aux.lse, lse, q.dtype)
    leaves = [x for x in (q, k, v, *captures) if x.requires_grad]
    if not leaves:
        return
    weight = normal(*out.shape, seed=99)
    reached = lse != -math.inf
    mine = torch.autograd.grad(_loss(out, aux.lse, weight, reached), leaves, retain_graph=True)
    theirs = torch.autograd.grad(_loss(expected, lse, weight, reached), leaves)
    for got, wanted in zip(mine, theirs, strict=True):
        close(got, wanted, q.dtype)


def _loss(
    out: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor, reached: torch.Tensor
) -> torch.Tensor:
    return (out.double() * weight).sum() + lse[reached].double().sum()
