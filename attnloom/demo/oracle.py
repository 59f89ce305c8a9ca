"""The demo's variant against the dense float64 oracle, output and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import attnloom
from attnloom.backends.reference import reference_attention
from attnloom.demo.variant import Variant

# Largest error over the oracle's largest value: sums of ~100 float32 products stay well inside.
TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Agreement:
    """error: largest absolute difference to the oracle over the oracle's largest value."""

    name: str
    error: float

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE


def check_against_oracle(variant: Variant, seed: int = 0) -> tuple[Agreement, ...]:
    """Run float32 attnloom and the float64 oracle on one small packed batch.

    Shapes: query, key, value [2, 4, 200, 32]; three uneven documents a row.
    Returns:
        One Agreement for each of out, dq, dk, dv and dbias.
    """
    rows, heads, length, head_dim = 2, 4, 200, 32
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.tensor([[31, 140], [100, 101]])
    documents = (torch.arange(length)[None, :, None] >= cuts[:, None, :]).sum(-1)  # [2, 200]
    variant = Variant(window_left=min(variant.window_left, 48), soft_cap=variant.soft_cap)
    shapes = [(rows, heads, length, head_dim)] * 3 + [(heads, variant.window_left + 1)]
    inputs = [torch.randn(shape, generator=generator) * 2 for shape in shapes]
    dout = torch.randn(shapes[0], generator=generator)

    def fused(query, key, value, bias):
        return attnloom.flex_attention(
            query,
            key,
            value,
            score_mod=variant.score_mod(bias),
            block_mask=variant.block_mask(documents),
        )

    def oracle(query, key, value, bias):
        mods = variant.score_mod(bias), variant.mask_mod(documents)
        return reference_attention(query, key, value, *mods).out

    ours = _out_and_gradients(fused, inputs, dout)
    exact = _out_and_gradients(oracle, [x.double() for x in inputs], dout.double())
    return tuple(
        Agreement(name, float((a.double() - e).abs().max() / e.abs().max()))
        for name, a, e in zip(("out", "dq", "dk", "dv", "dbias"), ours, exact, strict=True)
    )


def _out_and_gradients(attention, inputs, dout) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]
