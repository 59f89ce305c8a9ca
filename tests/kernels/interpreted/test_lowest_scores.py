"""Masks that are added to scores as very low numbers, as others write them, in half precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnloom import flex_attention

OPTIONS: Any = {"backend": "triton"}
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("low", [LOWEST, -1e31, -2e9, -1e9, -1e4])
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 300), (1, 700)])
def test_a_low_number_that_is_added_hides_keys(low: float, q_len: int, kv_len: int) -> None:
    """The first keys of a row, more than a tile of them, were NaN in all that followed."""
    draw = torch.Generator().manual_seed(q_len)
    q, k, v = (
        torch.randn(1, 2, n, 64, generator=draw).half().requires_grad_()
        for n in (q_len, kv_len, kv_len)
    )
    added = torch.where(torch.arange(kv_len) < 200, low, 0.0)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + added[j], kernel_options=OPTIONS)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = wide[0] @ wide[1].mT / math.sqrt(64)
    want = torch.softmax(scores[..., 200:], -1) @ wide[2][..., 200:, :]
    dout = torch.randn(out.shape, generator=draw).half()
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    wanted = (want, *torch.autograd.grad(want, wide, dout.double()))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs).norm() <= 4e-3 * theirs.norm()


def test_rows_of_lowest_scores_alone_have_equal_weights_and_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 1, n, 64).half().requires_grad_() for n in (20, 150, 150))
    out = flex_attention(
        q, k, v, lambda s, b, h, i, j: torch.where(i % 3 == 0, LOWEST, s), kernel_options=OPTIONS
    )
    mean = v.double().mean(2, keepdim=True)
    assert (out[:, :, ::3].double() - mean).abs().max() < 2e-3
    for gradient in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert gradient.isfinite().all()
