"""Captured tensors and their gradients, determinism, strides, memory."""

from __future__ import annotations

import pytest
import torch

import attnloom
from tests.harness.agree import agrees, close, normal, qkv
from tests.harness.memory import peak_growth


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_case_092_pair_bias_is_trained() -> None:
    """Captured tensors that need a gradient were refused."""
    bias = torch.nn.Parameter(normal(2, 60, 60))
    agrees(*qkv(2, 2, 60, 16), lambda s, b, h, i, j: s + bias[h, i, j], captures=[bias])


def test_case_094_radial_basis_bias() -> None:
    """A small reduction over captured rows inside the mod, gradients included."""
    alpha, beta = normal(2, 8).requires_grad_(), normal(2, 8, seed=3).abs().requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx) / 32
        return score + (alpha[h, :] * torch.exp(-beta[h, :] * distance**2)).sum()

    agrees(*qkv(1, 2, 64, 16), score_mod, captures=[alpha, beta])


def test_case_096_bias_without_block_mask_at_head_dim_16() -> None:
    """A trainable bias failed at D=16 without a mask."""
    bias = normal(64, 64).requires_grad_()
    agrees(*qkv(1, 1, 64, 16), lambda s, b, h, i, j: s + bias[i, j], captures=[bias])


def test_case_098_capture_shared_with_the_rest_of_the_graph() -> None:
    """A capture that is used elsewhere too gets the sum of both gradients, under a mask."""
    shared = normal(2, 50).requires_grad_()
    q, k, v = qkv(1, 2, 50, 16)
    mask = attnloom.create_block_mask(causal, None, None, 50, 50)

    def loss(attention):
        out = attention(lambda s, b, h, i, j: s + shared[h, j])
        return (out * shared[None, :, :, None]).sum() + (shared**2).sum()

    mine = loss(lambda mod: attnloom.flex_attention(q, k, v, mod, mask))

    def dense(mod):
        scores = q @ k.mT / 4 + shared[:, None]
        return scores.masked_fill(~torch.ones(50, 50).tril().bool(), -1e30).softmax(-1) @ v

    theirs = loss(dense)
    leaves = (q, k, v, shared)
    for got, wanted in zip(
        torch.autograd.grad(mine, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        close(got, wanted)


def test_case_100_views_of_one_projection() -> None:
    """Chunks of a fused projection are not contiguous."""
    x = normal(2, 70, 3 * 4 * 16).requires_grad_()
    q, k, v = (t.view(2, 70, 4, 16).transpose(1, 2) for t in x.chunk(3, dim=-1))
    out = attnloom.flex_attention(q, k, v)
    expected = (q @ k.mT / 4).softmax(-1) @ v
    close(out, expected)
    weight = normal(*out.shape, seed=8)
    (got,) = torch.autograd.grad((out * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), x)
    close(got, wanted)


@pytest.mark.slow
def test_case_110_plain_call_is_fused() -> None:
    """An uncompiled call held S x S scores: 2.5 GB at S=25,000, forward and backward."""
    S = 25_000

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 5

    q, k, v = qkv(1, 1, S, 32)
    with peak_growth() as peak:
        mask = attnloom.create_block_mask(window, None, None, S, S)
        attnloom.flex_attention(q, k, v, block_mask=mask).sum().backward()
    assert peak.bytes < 400 << 20


def gradients(threads: int) -> list[torch.Tensor]:
    table = normal(2, 2 * 150).requires_grad_()
    q, k, v = qkv(2, 2, 150, 16)
    mask = attnloom.create_block_mask(causal, None, None, 150, 150)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = attnloom.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + table[h, i - j + 150], mask,
            kernel_options={"deterministic": True},
        )  # fmt: skip
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))]
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize("threads", [1, 2])
def test_case_143_and_145_gradients_are_bitwise_equal(threads: int) -> None:
    """dq, dk and gradients of captures differed from run to run under the deterministic flag."""
    first = gradients(threads)
    for _ in range(4):
        for one, other in zip(first, gradients(threads), strict=True):
            assert torch.equal(one, other)


def test_case_097_deterministic_algorithms_of_torch_are_honoured() -> None:
    """torch.use_deterministic_algorithms asks for the same."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(2), gradients(2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_case_144_a_row_does_not_depend_on_its_batch() -> None:
    """Bitwise the same result for a sequence alone and in a batch."""
    q, k, v = (x.detach() for x in qkv(4, 2, 90, 16))
    mask = attnloom.create_block_mask(causal, None, None, 90, 90)
    together = attnloom.flex_attention(q, k, v, block_mask=mask)
    for n in range(4):
        alone = attnloom.flex_attention(q[n : n + 1], k[n : n + 1], v[n : n + 1], block_mask=mask)
        assert torch.equal(alone[0], together[n])
