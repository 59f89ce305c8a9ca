"""Results below the smallest normal number: ALiBi's far keys made a backward four times slower."""

from __future__ import annotations

import platform

import pytest
import torch

from attnloom import flex_attention

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="other processors keep them, at no cost"
)
TINY = torch.finfo(torch.float32).tiny


def attend(Q_LEN: int) -> torch.Tensor:
    """out [1, 2, Q_LEN, 16] of two keys, the second of weight e^-90, which is subnormal."""
    query = torch.zeros(1, 2, Q_LEN, 16)
    value = torch.tensor([0.0, 1e30]).view(1, 1, 2, 1).expand(1, 2, 2, 16)
    return flex_attention(
        query,
        torch.zeros(1, 2, 2, 16),
        value,
        score_mod=lambda score, b, h, q_idx, kv_idx: score - 90.0 * kv_idx,
        kernel_options={"backend": "cpu"},
    )


@pytest.mark.parametrize("Q_LEN", [1, 200], ids=["decode", "forward"])
def test_subnormal_weights_are_zero(Q_LEN: int) -> None:
    assert attend(Q_LEN).abs().max() == 0


@pytest.mark.parametrize("Q_LEN", [1, 200], ids=["decode", "forward"])
def test_kernels_leave_the_floating_point_mode_of_their_threads(Q_LEN: int) -> None:
    attend(Q_LEN)
    halves = torch.full((1 << 18,), TINY) / 2  # long enough for every thread to take a part
    assert (halves > 0).all()
