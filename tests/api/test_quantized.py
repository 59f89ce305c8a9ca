"""Keys and values of 8 bits, and factors that undo a quantisation."""

from __future__ import annotations

import re

import pytest
import torch

import attnloom
from attnloom import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
    create_block_mask,
    flex_attention,
)
from attnloom.backends.reference import reference_attention
from tests.harness.agree import close, normal

EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def tanh_of(s, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(s / 2.0) + 0.1 * h


def inputs(q_len, kv_len, D, kv_dtype, dtype=torch.float32, heads=(4, 2)):
    query = normal(2, heads[0], q_len, D, dtype=dtype)
    key, value = (normal(2, heads[1], kv_len, D, seed=i).to(kv_dtype) for i in (1, 2))
    return query, key, value


def grouped_oracle(query, key, value, *mods, **options):
    """The float64 oracle, which knows nothing of groups."""
    group = query.size(1) // key.size(1)
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    return reference_attention(query.double(), key, value, *mods, **options)


@pytest.mark.parametrize("kv_dtype", EIGHT)
@pytest.mark.parametrize("width", [256, 251])
def test_every_pattern_is_read_exactly(kv_dtype, width):
    """One key has the weight 1, so that out is the value as it was read."""
    value = torch.arange(256, dtype=torch.uint8).view(kv_dtype)[:width].view(1, 1, 1, width)
    out = flex_attention(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), value)
    assert torch.equal(out.nan_to_num(nan=1e9), value.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize("kv_dtype", EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_forward(kv_dtype, dtype, q_len, backend):
    query, key, value = inputs(q_len, 150, 40, kv_dtype, dtype)
    mask = create_block_mask(lambda b, h, i, j: j <= i + 80, None, None, q_len, 150)
    out, lse = _run(query, key, value, tanh_of, mask, backend)
    truth = grouped_oracle(query, key, value, tanh_of, mask.mask_mod)
    assert out.dtype == dtype
    close(out, truth.out, dtype)
    close(lse, truth.lse, dtype)


def _run(query, key, value, score_mod, mask, backend):
    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod,
        mask,
        enable_gqa=True,
        kernel_options={"backend": backend},
        return_aux=attnloom.AuxRequest(lse=True),
    )
    return out, aux.lse


def test_one_of_key_and_value():
    query, key, value = inputs(9, 33, 16, torch.float8_e4m3fn)
    wide = value.float()
    out = flex_attention(query, key, wide, enable_gqa=True)
    close(out, grouped_oracle(query, key, wide).out)


@pytest.mark.parametrize("kv_dtype", EIGHT)
def test_query_too(kv_dtype):
    query, key, value = inputs(50, 50, 16, kv_dtype)
    small = query.to(kv_dtype)
    out = flex_attention(small, key, value, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    close(out, grouped_oracle(small, key, value).out, torch.bfloat16)


def test_strides():
    query, key, value = inputs(9, 33, 16, torch.float8_e5m2)
    key = key.transpose(2, 3).contiguous().transpose(2, 3)
    value = value.transpose(1, 2).contiguous().transpose(1, 2)
    out = flex_attention(query, key, value, enable_gqa=True)
    close(out, grouped_oracle(query, key, value).out)


def test_gradients_of_query_and_captures():
    """Kernels give no gradient of 8 bits: keys and values are converted where one is wanted."""
    query, key, value = inputs(20, 20, 16, torch.float8_e4m3fn)
    slope = normal(4).requires_grad_()

    def score(s, b, h, i, j):
        return s + slope[h] * (i - j)

    flex_attention(query, key, value, score, enable_gqa=True).square().sum().backward()
    (wanted,) = torch.autograd.grad(
        grouped_oracle(query, key, value, score).out.square().sum(), slope
    )
    close(slope.grad, wanted)
    query.requires_grad_()
    flex_attention(query, key, value, enable_gqa=True).square().sum().backward()
    (wanted,) = torch.autograd.grad(grouped_oracle(query, key, value).out.square().sum(), query)
    close(query.grad, wanted)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_a_factor_that_is_learned(name):
    """Keys of 8 bits stayed as they were, and the backward wrote their gradients past the end."""
    query, key, value = inputs(20, 20, 16, torch.float8_e4m3fn)
    factor = (torch.rand(2, 2) + 0.5).requires_grad_()
    out = flex_attention(query, key, value, enable_gqa=True, **{name: factor})
    out.square().sum().backward()
    wide = factor.detach().double()[..., None, None].requires_grad_()
    by_head = wide.repeat_interleave(2, 1)
    scaled = {
        "q_descale": (query.double() * by_head, key, value),
        "k_descale": (query, key.double() * wide, value),
        "v_descale": (query, key, value.double() * wide),
    }
    truth = grouped_oracle(*scaled[name]).out.square().sum()
    (wanted,) = torch.autograd.grad(truth, wide)
    close(factor.grad, wanted[..., 0, 0])


def test_transforms():
    query, key, value = inputs(5, 5, 8, torch.float8_e4m3fn, heads=(2, 2))
    grad = torch.func.grad(lambda q: flex_attention(q, key, value).square().sum())(query)
    assert torch.isfinite(grad).all() and grad.any()


def test_autocast():
    query, key, value = inputs(5, 40, 8, torch.float8_e4m3fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(query, key, value, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    close(out, grouped_oracle(query, key, value).out, torch.bfloat16)


@pytest.mark.parametrize("kv_dtype", EIGHT)
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(kv_dtype, page_size):
    """A cache of 8 bits, written from float32: numbers too large become the greatest one."""
    lengths, D = (40, 1, 77), 24
    cache = attnloom.PagedKVCache(20, page_size, 2, D, dtype=kv_dtype)
    keys = [normal(1, 2, n, D, seed=i) for i, n in enumerate(lengths)]
    values = [normal(1, 2, n, D, seed=9 + i) for i, n in enumerate(lengths)]
    keys[0][0, 0, 3, 5] = 1e9
    names = [cache.new() for _ in lengths]
    for name, key, value in zip(names, keys, values, strict=True):
        cache.append([name], key, value)
    query = normal(3, 4, 1, D, seed=50)
    out = flex_attention(query, cache.batch(names, 1).layer(0), enable_gqa=True)
    limit = torch.finfo(kv_dtype).max
    for i in range(3):
        stored = [x[i].clamp(-limit, limit).to(kv_dtype) for x in (keys, values)]
        close(out[i : i + 1], grouped_oracle(query[i : i + 1], *stored).out)


def test_a_cache_of_eight_bits_is_forked_moved_and_saved():
    cache = attnloom.PagedKVCache(20, 16, 1, 8, dtype=EIGHT[0])
    first = cache.new()
    cache.append([first], *[normal(1, 1, 20, 8, seed=i) for i in (1, 2)])
    second = cache.fork(first)
    cache.append([second], *[normal(1, 1, 3, 8, seed=i) for i in (3, 4)])
    cache.move_tokens([(second, 20, 22)])
    cache.free(first)
    cache.defragment()
    query = normal(1, 1, 1, 8)
    out = flex_attention(query, cache)
    again = attnloom.PagedKVCache(20, 16, 1, 8, dtype=EIGHT[0])
    again.load_state_dict(cache.state_dict())
    assert torch.equal(flex_attention(query, again), out)
    key, value = (
        torch.cat([normal(1, 1, 20, 8, seed=i), normal(1, 1, 3, 8, seed=i + 2)[:, :, [2, 1, 2]]], 2)
        for i in (1, 2)
    )
    close(out, grouped_oracle(query, key.to(EIGHT[0]), value.to(EIGHT[0])).out)


Q_FACTORS = [0.5, torch.tensor(0.5), torch.tensor([[0.5, 2.0]]), torch.rand(2, 4) + 0.5]


@pytest.mark.parametrize("q_descale", Q_FACTORS, ids=["number", "0-d", "by key head", "by head"])
@pytest.mark.parametrize("score_mod", [None, tanh_of])
def test_factors(q_descale, score_mod):
    query, key, value = inputs(20, 50, 16, torch.float8_e4m3fn)
    k_descale = torch.rand(2, 1) + 0.5
    v_descale = torch.rand(2, 2) + 0.5
    out = flex_attention(
        query,
        key,
        value,
        score_mod,
        enable_gqa=True,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    factor = torch.as_tensor(q_descale)
    if factor.dim() == 2 and factor.size(1) == 2:
        factor = factor.repeat_interleave(2, 1)
    factor = factor[..., None, None] if factor.dim() else factor
    truth = grouped_oracle(
        query * factor,
        key.float() * k_descale[..., None, None],
        value.float() * v_descale[..., None, None],
        score_mod,
    )
    close(out, truth.out)


def test_numbers_alone_go_into_the_scale():
    before = attnloom.compile_stats().kernels_compiled
    query, key, value = inputs(3, 9, 16, torch.float8_e4m3fn)
    flex_attention(query, key, value, enable_gqa=True)
    first = attnloom.compile_stats().kernels_compiled
    out = flex_attention(
        query, key, value, enable_gqa=True, q_descale=2.0, k_descale=3, scale=0.1, v_descale=0.25
    )
    assert attnloom.compile_stats().kernels_compiled == first >= before
    close(out, 0.25 * grouped_oracle(query, key, value, scale=0.6).out)


def test_factors_over_a_cache():
    cache = attnloom.PagedKVCache(4, 16, 2, 8, dtype=torch.float8_e4m3fn)
    name = cache.new()
    key, value = normal(1, 2, 20, 8, seed=1) * 100, normal(1, 2, 20, 8, seed=2)
    factor = key.abs().amax((2, 3)) / 448
    cache.append([name], key / factor[..., None, None], value)
    query = normal(1, 2, 1, 8)
    out = flex_attention(query, cache.batch([name], 1).layer(0), k_descale=factor)
    stored = (key / factor[..., None, None]).to(torch.float8_e4m3fn).float()
    truth = reference_attention(
        query, stored * factor[..., None, None], value.to(torch.float8_e4m3fn)
    )
    close(out, truth.out)


REFUSED = {
    "shape": (
        {"k_descale": torch.ones(3, 2)},
        ShapeError,
        "k_descale has shape [3, 2]; it must be [] or [B, Hkv], here [2, 2], where each of both "
        "may be 1.",
    ),
    "by query head": ({"v_descale": torch.ones(2, 4)}, ShapeError, "v_descale has shape [2, 4]"),
    "integers": (
        {"q_descale": torch.ones(2, 2).int()},
        DtypeError,
        "q_descale is torch.int32; it must be float32 (or float64, half).",
    ),
    "text": (
        {"q_descale": "1"},
        OptionError,
        "q_descale is '1'; it must be a finite number or a tensor [B, Hkv]",
    ),
    "infinite": ({"k_descale": float("inf")}, OptionError, "k_descale is inf; it must be a finite"),
    "device": (
        {"k_descale": torch.ones(2, 2, device="meta")},
        DeviceError,
        "k_descale is on meta, query on cpu; move it with .to('cpu').",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        flex_attention(*inputs(5, 9, 8, EIGHT[0]), enable_gqa=True, **options)


def test_nested_tensors_with_factors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(3, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(UnsupportedError, match="v_descale is given for nested tensors"):
        flex_attention(nested, nested, nested, v_descale=2.0)


def test_nested_tensors_of_eight_bits():
    parts = [normal(n, 2, 8, seed=n).to(EIGHT[0]) for n in (5, 9)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = flex_attention(nested, nested, nested)
    whole = parts[1].transpose(0, 1)[None]
    found = out.transpose(1, 2).unbind()[1].transpose(0, 1)[None]
    close(found, reference_attention(whole, whole, whole).out, torch.bfloat16)
