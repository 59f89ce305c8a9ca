"""Keys and values of 8 bits in the Triton kernels: every query length, pages too."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom import PagedKVCache, create_block_mask, flex_attention
from attnloom.backends.reference import reference_attention
from tests.harness.agree import close, normal

OPTIONS = {"backend": "triton"}


def tanh_of(s, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(s / 2.0) + 0.1 * h


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 40])
def test_forward(stored: torch.dtype, dtype: torch.dtype, q_len: int) -> None:
    query = normal(2, 4, q_len, 24, dtype=dtype)
    key, value = (normal(2, 2, 90, 24, seed=i).to(stored) for i in (1, 2))
    mask = create_block_mask(lambda b, h, i, j: j <= i + 50, None, None, q_len, 90)
    out, aux = flex_attention(
        query,
        key,
        value,
        tanh_of,
        mask,
        enable_gqa=True,
        kernel_options=OPTIONS,
        return_aux=attnloom.AuxRequest(lse=True),
    )
    wide = (x.double().repeat_interleave(2, 1) for x in (key, value))
    truth = reference_attention(query.double(), *wide, tanh_of, mask.mask_mod)
    close(out, truth.out, dtype)
    close(aux.lse, truth.lse, dtype)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pages(stored: torch.dtype) -> None:
    cache = PagedKVCache(8, 16, 1, 16, dtype=stored)
    lengths = (20, 3)
    written = [[normal(1, 1, n, 16, seed=9 * i + n) for i in (1, 2)] for n in lengths]
    names = [cache.new() for _ in lengths]
    for name, (key, value) in zip(names, written, strict=True):
        cache.append([name], key, value)
    query = normal(2, 2, 1, 16, dtype=torch.bfloat16)
    out = flex_attention(query, cache, enable_gqa=True, kernel_options=OPTIONS)
    for i, pair in enumerate(written):
        wide = (x.to(stored).double().repeat_interleave(2, 1) for x in pair)
        truth = reference_attention(query[i : i + 1].double(), *wide)
        close(out[i : i + 1], truth.out, torch.bfloat16)
