"""The backward of a sparse mask in refined blocks: that of a mask built so."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.launch import TritonBackend
from attnloom.backends.triton.refined import SIDES, refined
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_call(length: int, side: int) -> AttentionCall:
    """Causal documents of 170 tokens."""
    device = torch.device("cuda", 0)
    ids = torch.arange(length, device=device) // 170

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (ids[q] == ids[kv])

    made = attnloom.create_block_mask(mask_mod, None, None, length, length, "cuda", BLOCK_SIZE=side)
    draw = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, length, 64, generator=draw, dtype=torch.bfloat16, device=device)
        for _ in range(3)
    )
    mask = trace_mask(mask_mod, device)
    return AttentionCall(query, key, value, None, mask, made.lists(), 0.125, KernelOptions())


@pytest.mark.parametrize("length", [1024, 1500])
def test_gradients_are_those_of_small_blocks(length: int) -> None:
    backend = TritonBackend()
    coarse, fine = make_call(length, 128), make_call(length, SIDES[0])
    assert refined(fine) is fine
    again = refined(coarse)
    assert again.blocks is not None and again.blocks.q_block == SIDES[0]
    assert refined(coarse).blocks is again.blocks
    result = backend.forward(coarse, False)
    dout = torch.randn_like(result.out)
    mine, expected = (
        backend.backward(call, result.out, result.lse, dout, None) for call in (coarse, fine)
    )
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(mine, name), getattr(expected, name)), name
