"""Captured tensors of another precision than the inputs, with gradients."""

import pytest
import torch

from attnloom import flex_attention
from attnloom.backends.reference import reference_attention

MODS = {
    "scaled": lambda c: lambda s, b, h, q, kv: s + c[h, kv] * 0.5,
    "chosen": lambda c: lambda s, b, h, q, kv: s + torch.where(q > kv, c[h, kv], 0.0),
    "clipped": lambda c: lambda s, b, h, q, kv: s + c[h, kv].relu(),
    "squared": lambda c: lambda s, b, h, q, kv: s + c[h, kv] * c[h, kv],
}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("name", MODS)
def test_float64_scores_with_a_learned_float32_capture_compile(name, backend):
    """The gradient read dscore as float32 where the score is float64, which C++ refused."""
    generator = torch.Generator().manual_seed(0)
    capture = torch.randn(2, 20, generator=generator, requires_grad=True)
    x = torch.randn(1, 2, 20, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(1, 2, 20, 8, generator=generator, dtype=torch.float64)
    mod = MODS[name](capture)
    out = flex_attention(x, x, x, mod, kernel_options={"backend": backend})
    ours = torch.autograd.grad(out, (x, capture), dout)
    oracle = torch.autograd.grad(reference_attention(x, x, x, mod).out, (x, capture), dout)
    torch.testing.assert_close(ours[0], oracle[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1], oracle[1], rtol=0, atol=1e-5)
