"""Dtypes, checkpointing, functional transforms, export, and what others lack on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnloom
from attnloom.backends.reference import reference_attention
from tests.harness.agree import agrees, close, normal, qkv


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_mask(S: int) -> attnloom.BlockMask:
    return attnloom.create_block_mask(causal, None, None, S, S)


def test_case_113_autocast_is_honoured() -> None:
    """Under autocast, q and k promoted to float32 by a norm made attention run in float32."""
    q, k, v = qkv(1, 2, 64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnloom.flex_attention(q, k, v.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    close(out, reference_attention(q, k, v).out)


def test_case_114_fp8_cache_with_bfloat16_queries() -> None:
    """Keys and values in fp8 with a query in bfloat16."""
    q, k, v = (x.detach() for x in qkv(1, 2, 4, 16, keys=64, dtype=torch.bfloat16))
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    out = attnloom.flex_attention(q, k8, v8)
    close(out, reference_attention(q, k8, v8).out)


def test_case_115_fp8_inputs() -> None:
    """All inputs in fp8, with a factor for each: others want them inside a score_mod."""
    q, k, v = (x.detach() for x in qkv(1, 2, 64, 16))
    factors = [x.abs().amax((2, 3)) / 448 for x in (q, k, v)]
    small = [
        (x / f[..., None, None]).to(torch.float8_e4m3fn)
        for x, f in zip((q, k, v), factors, strict=True)
    ]
    names = ("q_descale", "k_descale", "v_descale")
    out = attnloom.flex_attention(*small, **dict(zip(names, factors, strict=True)))
    wide = [x.double() * f[..., None, None] for x, f in zip(small, factors, strict=True)]
    close(out, reference_attention(*wide).out, torch.bfloat16)


def test_case_116_window_and_softcap_compose() -> None:
    """Window and softcap together were refused in serving."""
    agrees(
        *qkv(1, 2, 100, 16),
        lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
        lambda b, h, i, j: (i >= j) & (i - j < 30),
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_case_123_activation_checkpointing(reentrant: bool) -> None:
    """checkpoint(attention) recomputes and gives the same gradients."""
    slope = normal(2).requires_grad_()
    q, k, v = qkv(1, 2, 70, 16)
    mask = causal_mask(70)

    def block(q, k, v):
        return attnloom.flex_attention(q, k, v, lambda s, b, h, i, j: s + slope[h] * (j - i), mask)

    plain = torch.autograd.grad(block(q, k, v).square().sum(), (q, k, v))
    out = checkpoint(block, q, k, v, use_reentrant=reentrant)
    out.square().sum().backward()
    for got, wanted in zip((q.grad, k.grad, v.grad), plain, strict=True):
        torch.testing.assert_close(got, wanted)
    assert slope.grad is not None


def test_case_126_backward_can_be_called_again() -> None:
    """Schedules that split the backward call it more than once; a mask is a pytree."""
    q, k, v = qkv(1, 2, 64, 16)
    out = attnloom.flex_attention(q, k, v, block_mask=causal_mask(64))
    first = torch.autograd.grad(out.sum(), (q,), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(first[0], second[0])
    leaves, spec = torch.utils._pytree.tree_flatten(causal_mask(64))
    assert all(isinstance(leaf, torch.Tensor | None.__class__) for leaf in leaves)
    back = torch.utils._pytree.tree_unflatten(leaves, spec)
    agrees(q, k, v, mask_mod=causal, block_mask=back)


def test_case_128_and_129_partial_results_merge_by_lse() -> None:
    """Ring attention: four partial calls over keys, merged by lse, gradients through both."""
    q, k, v = qkv(1, 2, 64, 16, keys=128)
    outs, lses = [], []
    for n in range(4):
        part = slice(32 * n, 32 * n + 32)
        mask = attnloom.create_block_mask(
            lambda b, h, i, j, first=32 * n: i + 64 >= j + first, None, None, 64, 32
        )
        out, aux = attnloom.flex_attention(
            q, k[:, :, part], v[:, :, part], block_mask=mask,
            return_aux=attnloom.AuxRequest(lse=True),
        )  # fmt: skip
        outs.append(out)
        lses.append(aux.lse)
    merged, _ = attnloom.merge_attention(outs, lses)
    expected, _, _ = reference_attention(q, k, v, mask=lambda b, h, i, j: i + 64 >= j)
    close(merged, expected)
    weight = normal(*merged.shape, seed=6)
    for got, wanted in zip(
        torch.autograd.grad((merged * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        close(got, wanted)


@pytest.mark.parametrize("block", [16, 64, (32, 128)])
@pytest.mark.parametrize("lengths", [(96, 96), (100, 260), (7, 33)])
def test_case_128_context_parallel_masks(block, lengths) -> None:
    """Only equal lengths, blocks of 128 and 128 queries a rank were possible."""
    q, k, v = qkv(1, 2, lengths[0], 16, keys=lengths[1])
    mask = attnloom.create_block_mask(
        lambda b, h, i, j: i + 3 >= j, None, None, *lengths, BLOCK_SIZE=block
    )
    parts = [
        attnloom.flex_attention(q[:, :, a:b], k, v, block_mask=mask.rows(a, b))
        for a, b in attnloom.balanced_rows(mask, 3)
    ]
    expected = reference_attention(q, k, v, mask=lambda b, h, i, j: i + 3 >= j).out
    close(torch.cat(parts, 2), expected)


def test_case_130_export() -> None:
    """torch.export of a module that attends."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attnloom.flex_attention(q, k, v)

    q, k, v = (x.detach() for x in qkv(2, 2, 64, 16))
    program = torch.export.export(Attention(), (q, k, v))
    close(program.module()(q, k, v), reference_attention(q, k, v).out)


def test_case_131_functional_gradient() -> None:
    """torch.func.grad raised a KeyError on inputs of (1, 1, 1, 16)."""
    q, k, v = (x.detach() for x in qkv(1, 1, 1, 16))

    def loss(q, k, v):
        return attnloom.flex_attention(q, k, v).square().sum()

    dq, dk, dv = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    close(dv, 2 * v)
    assert not dq.any()
    assert not dk.any()


def test_case_132_forward_mode() -> None:
    """Forward-mode differentiation, as mean-flow training uses it."""
    q, k, v = (x.detach().double() for x in qkv(1, 2, 20, 8))
    tangents = tuple(normal(*x.shape, dtype=torch.float64, seed=9) for x in (q, k, v))
    mask = causal_mask(20)
    out, dout = torch.func.jvp(
        lambda q, k, v: attnloom.flex_attention(q, k, v, block_mask=mask), (q, k, v), tangents
    )
    expected, slope = torch.func.jvp(_dense_causal, (q, k, v), tangents)
    close(out, expected)
    close(dout, slope)


def _dense_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def test_case_133_vmap() -> None:
    """torch.vmap over the call."""
    q, k, v = (normal(3, 1, 2, 20, 16, seed=i) for i in range(3))
    out = torch.vmap(attnloom.flex_attention)(q, k, v)
    for n in range(3):
        close(out[n], reference_attention(q[n], k[n], v[n]).out)


def test_case_134_double_backward() -> None:
    """A gradient penalty differentiates the gradient."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv(1, 1, 6, 4))
    mask = causal_mask(6)

    def attention(q, k, v):
        return attnloom.flex_attention(q, k, v, block_mask=mask)

    assert torch.autograd.gradgradcheck(attention, (q, k, v))


def test_case_135_and_136_cpu_has_backward_and_lse() -> None:
    """On the CPU others have neither gradients nor lse."""
    agrees(*qkv(1, 2, 50, 16), lambda s, b, h, i, j: s + (j - i) * 0.125, causal)
