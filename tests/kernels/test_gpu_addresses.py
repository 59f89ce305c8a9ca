"""Captured tensors that begin anywhere, on a real GPU: right, by one kernel more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.stats import compile_stats
from tests.harness.agree import agrees, normal, qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
S = 300


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_captured_tensors_begin_anywhere(backend: str) -> None:
    """Every combination after the first one that is not aligned finds its kernels."""
    with torch.device("cuda"):
        x = qkv(1, 2, S, 64, dtype=torch.bfloat16)
        ids = torch.arange(S + 1) // 37
        block_mask = attnloom.create_block_mask(
            lambda b, h, i, j: ids[i] == ids[j], None, None, S, S, device="cuda"
        )
        bias, scale, slope = (normal(S + 1, seed=3 + i) for i in range(3))

        def call(first: int, second: int, third: int) -> None:
            a, b, c = bias[first : first + S], scale[second : second + S], slope[third:]
            agrees(
                *x,
                lambda s, batch, h, i, j: s * b[i] + a[j] + c[h],
                lambda batch, h, i, j: ids[i] == ids[j],
                block_mask=block_mask,
                kernel_options={"backend": backend},
            )

        call(0, 0, 0)
        call(1, 0, 0)
        compiled = compile_stats().kernels_loaded
        for n in range(2, 8):
            call(n & 1, n >> 1 & 1, n >> 2)
    assert compile_stats().kernels_loaded == compiled
