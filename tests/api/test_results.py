"""Auxiliary outputs, empty sizes, dtypes, autocast and strides."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnloom import AuxRequest, create_block_mask, flex_attention, noop_mask
from attnloom.backends.cpu import launch
from tests.api.mods import causal, late_start, normal, qkv, slope_bias, soft_cap


def dense(q, k, v, scale=None, live=None):
    """Float64 attention with one key head for each query head: out, lse, max_scores."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale or q.size(-1) ** -0.5)
    if live is not None:
        scores = scores.masked_fill(~live, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None].nan_to_num(neginf=0.0))
    return weights @ v, lse, scores.amax(-1)


def test_aux_outputs_are_natural_and_match_dense():
    q, k, v = qkv()
    live = torch.ones(5, 7, dtype=torch.bool).tril()
    live[:3] = False
    mask = create_block_mask(late_start, None, None, 5, 7, device="cpu")
    out, aux = flex_attention(
        q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    for got, want in zip((out, aux.lse, aux.max_scores), dense(q, k, v, live=live), strict=True):
        torch.testing.assert_close(got, want)
    assert (out[:, :, :3] == 0).all()
    assert (aux.lse[:, :, :3] == -math.inf).all()
    assert (aux.max_scores[:, :, :3] == -math.inf).all()


@pytest.mark.parametrize(("lse", "max_scores"), [(False, False), (True, False), (False, True)])
def test_aux_outputs_are_none_unless_requested(lse, max_scores):
    _, aux = flex_attention(*qkv(key_heads=4), return_aux=AuxRequest(lse, max_scores))
    assert (aux.lse is not None, aux.max_scores is not None) == (lse, max_scores)


EMPTY = {
    "no batch": (0, 2, 2, 3, 4),
    "no heads": (2, 0, 0, 3, 4),
    "no queries": (2, 4, 2, 0, 4),
    "no keys": (2, 4, 2, 3, 0),
    "nothing": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_empty_sizes(name, backend):
    batch, heads, key_heads, q_len, kv_len = EMPTY[name]
    q = torch.ones(batch, heads, q_len, 8, requires_grad=True)
    k = torch.ones(batch, key_heads, kv_len, 8, requires_grad=True)
    v = torch.ones(batch, key_heads, kv_len, 6, requires_grad=True)
    slope = torch.ones(max(heads, 1), requires_grad=True)
    out, aux = flex_attention(
        q,
        k,
        v,
        slope_bias(slope),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
        kernel_options={"backend": backend},
    )
    assert out.shape == (batch, heads, q_len, 6)
    assert aux.lse.shape == aux.max_scores.shape == (batch, heads, q_len)
    assert (out == 0).all()
    assert (aux.lse == -math.inf).all()
    for tensor, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == tensor.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("q_len", [0, 3])
def test_empty_sizes_with_a_mask(q_len):
    mask = create_block_mask(causal, None, None, q_len, 0, device="cpu")
    q, k = torch.ones(2, 2, q_len, 8), torch.ones(2, 2, 0, 8)
    out = flex_attention(q, k, k, block_mask=mask)
    assert out.shape == (2, 2, q_len, 8)
    assert (out == 0).all()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("query_dtype", DTYPES)
@pytest.mark.parametrize("key_dtype", [torch.float32, torch.bfloat16])
def test_mixed_dtypes(query_dtype, key_dtype):
    q, k, v = (x.to(key_dtype) for x in qkv(head_dim=16))
    q = q.to(query_dtype).requires_grad_()
    k.requires_grad_()
    out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert out.dtype == query_dtype
    assert aux.lse.dtype == (torch.float64 if query_dtype == torch.float64 else torch.float32)
    coarse = torch.bfloat16 in (query_dtype, key_dtype) or query_dtype == torch.float16
    torch.testing.assert_close(
        out.double(), dense(q, k, v)[0], atol=0.03 if coarse else 1e-5, rtol=0
    )
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert (dq.dtype, dk.dtype) == (query_dtype, key_dtype)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_casts_like_torch_attention(low):
    q, k, v = (x.requires_grad_() for x in qkv(key_heads=4, head_dim=16, dtype=torch.float32))
    with torch.autocast("cpu", dtype=low):
        got = flex_attention(q, k, v)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert got.dtype == want.dtype == low
    torch.testing.assert_close(got, want, atol=0.03, rtol=0)
    assert torch.autograd.grad(got.sum(), q)[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=low):
        lowered = torch.autograd.grad(flex_attention(q, k, v).float().square().sum(), q)[0]
        kept = flex_attention(q.double(), k.double(), v.double())
    assert kept.dtype == torch.float64
    exact = torch.autograd.grad(dense(q, k, v)[0].square().sum(), q)[0]
    torch.testing.assert_close(lowered, exact, atol=0.1, rtol=0)


def test_strided_and_shared_keys():
    q = normal(3, 5, 4, 16).transpose(1, 2)
    packed = normal(1, 7, 2, 32, seed=1)
    k, v = packed.transpose(1, 2).chunk(2, -1)
    got = flex_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(got, dense(q, k, v)[0].float())


def test_identity_mods_need_no_kernel_of_their_own():
    q, k, v = qkv(key_heads=4)
    mask = create_block_mask(noop_mask, None, None, 5, 7, device="cpu")
    plain = flex_attention(q, k, v)
    same = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score, mask)
    torch.testing.assert_close(same, plain, atol=0, rtol=0)


def test_a_tensor_and_a_number_are_read_anew_on_every_call():
    q, k, v = qkv(key_heads=4)
    slope = torch.zeros(4, dtype=torch.float64)
    mod = slope_bias(slope)
    flat = flex_attention(q, k, v, mod)
    slope += 1
    assert not torch.allclose(flex_attention(q, k, v, mod), flat)
    assert not torch.allclose(
        flex_attention(q, k, v, soft_cap(1.0)), flex_attention(q, k, v, soft_cap(0.1))
    )


def test_another_default_device_changes_nothing(monkeypatch):
    """A kernel's workspace lay on that device: it wrote to memory that was not there."""
    q, k, v = (x.requires_grad_() for x in qkv())
    slope = torch.ones(4, dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(causal, None, None, 5, 7, device="cpu")

    def run():
        out = flex_attention(q, k, v, slope_bias(slope), mask, enable_gqa=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, slope))

    want = run()
    nothing = torch.empty(0, dtype=torch.uint8)
    monkeypatch.setattr(launch._kept, "workspace", nothing)
    torch.set_default_device("meta")
    try:
        window = create_block_mask(lambda b, h, q, k: q - k < 3, 1, 1, 70, 70, "cpu", 16)
        got = run()
    finally:
        torch.set_default_device(None)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert window.lists().entries.device.type == "cpu"


def test_threads_share_plans():
    inputs = qkv(key_heads=4)
    want = [flex_attention(*inputs, soft_cap(float(i + 1))) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        got = list(
            pool.map(lambda i: flex_attention(*inputs, soft_cap(float(i % 8 + 1))), range(64))
        )
    for i, out in enumerate(got):
        torch.testing.assert_close(out, want[i % 8], atol=0, rtol=0)
