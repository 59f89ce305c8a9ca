"""Texts of errors about arguments: what is wrong, why, and what to write instead."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom import create_block_mask, flex_attention
from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError, UnsupportedError
from tests.api.mods import causal


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


INPUTS = {
    "rank": (
        (zeros(4, 8, 16), zeros(4, 8, 16), zeros(4, 8, 16)),
        ShapeError,
        "query has 3 dimensions; it must have 4: [batch, heads, length, head_dim]. Use unsqueeze, "
        "or view and transpose for a packed projection. Got query [4, 8, 16], key [4, 8, 16], "
        "value [4, 8, 16].",
    ),
    "head_dim": (
        (zeros(1, 2, 8, 16), zeros(1, 2, 8, 32), zeros(1, 2, 8, 32)),
        ShapeError,
        "query has head_dim 16, key has 32; they are multiplied, so they must be equal (only "
        "value's may differ). Got query [1, 2, 8, 16], key [1, 2, 8, 32], value [1, 2, 8, 32].",
    ),
    "value length": (
        (zeros(1, 2, 8, 16), zeros(1, 2, 8, 16), zeros(1, 2, 9, 16)),
        ShapeError,
        "key has length 8, value has 9; every key needs its value, so these must be equal. "
        "Got query [1, 2, 8, 16], key [1, 2, 8, 16], value [1, 2, 9, 16].",
    ),
    "value heads": (
        (zeros(1, 2, 8, 16), zeros(1, 2, 8, 16), zeros(1, 1, 8, 16)),
        ShapeError,
        "key has heads 2, value has 1; every key needs its value, so these must be equal. "
        "Got query [1, 2, 8, 16], key [1, 2, 8, 16], value [1, 1, 8, 16].",
    ),
    "no features": (
        (zeros(1, 2, 8, 0), zeros(1, 2, 8, 0), zeros(1, 2, 8, 4)),
        ShapeError,
        "query has head_dim 0; it must be at least 1. Got query [1, 2, 8, 0], key [1, 2, 8, 0], "
        "value [1, 2, 8, 4].",
    ),
    "batch": (
        (zeros(4, 2, 8, 16), zeros(2, 2, 8, 16), zeros(2, 2, 8, 16)),
        ShapeError,
        "query has batch 4, key and value have 2; the batches must be equal, or 1 for a key and "
        "value that every batch entry shares. Got query [4, 2, 8, 16], key [2, 2, 8, 16], "
        "value [2, 2, 8, 16].",
    ),
    "heads without enable_gqa": (
        (zeros(1, 8, 8, 16), zeros(1, 2, 8, 16), zeros(1, 2, 8, 16)),
        ShapeError,
        "query has 8 heads, key and value have 2; without grouped queries these must be equal. "
        "Pass enable_gqa=True to share each key head between query heads. Got query "
        "[1, 8, 8, 16], key [1, 2, 8, 16], value [1, 2, 8, 16].",
    ),
    "dtype": (
        (
            zeros(1, 2, 8, 16, dtype=torch.int64),
            zeros(1, 2, 8, 16),
            zeros(1, 2, 8, 16),
        ),
        DtypeError,
        "query is torch.int64; attention takes float64, float32, bfloat16, float16, "
        "float8_e4m3fn and float8_e5m2. Convert it first, for example query.to(torch.bfloat16).",
    ),
    "device": (
        (zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16, device="meta"), zeros(1, 2, 8, 16)),
        DeviceError,
        "query is on cpu, key on meta, value on cpu; all three must be on one device. Move them "
        "with .to(device).",
    ),
    "no tensor": (
        (zeros(1, 2, 8, 16), None, zeros(1, 2, 8, 16)),
        OptionError,
        "key is a NoneType; it must be a torch.Tensor.",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input_errors(name):
    inputs, kind, text = INPUTS[name]
    with pytest.raises(kind) as caught:
        flex_attention(*inputs)
    assert str(caught.value) == text


def test_group_size_must_be_whole():
    q, k = zeros(2, 12, 8, 16), zeros(2, 5, 8, 16)
    with pytest.raises(ShapeError) as caught:
        flex_attention(q, k, k, enable_gqa=True)
    assert str(caught.value) == (
        "query has 12 heads, key has 5; query heads must be a multiple of key heads. "
        "Got query [2, 12, 8, 16], key [2, 5, 8, 16], value [2, 5, 8, 16]."
    )


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([zeros(2, 3, 4), zeros(2, 5, 4)])
    with pytest.raises(
        UnsupportedError, match=r"nested tensor with the layout torch.strided.*cu_seqlens"
    ):
        flex_attention(nested, nested, nested)
    with pytest.raises(NotImplementedError):  # what code written for torch catches
        flex_attention(nested, nested, nested)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.1", True, torch.ones(4)])
def test_scale_must_be_a_number(scale):
    q = zeros(1, 1, 4, 8)
    with pytest.raises(OptionError, match="it must be a finite Python number or None"):
        flex_attention(q, q, q, scale=scale)


SMALLER = (
    "block_mask was made for Q_LEN 128 and KV_LEN 256, but query has length 64 and key 256. A "
    "mask is tied to token positions, so it is never cut or stretched silently. For the first 64 "
    "queries and 256 keys use block_mask.crop(64, 256); for queries from position p on (decoding) "
    "use block_mask.rows(p, p + 64); or build create_block_mask(mask_mod, B, H, 64, 256)."
)
LARGER = (
    "block_mask was made for Q_LEN 128 and KV_LEN 256, but query has length 128 and key 300. A "
    "mask is tied to token positions, so it is never cut or stretched silently. It does not cover "
    "these inputs: build one with create_block_mask(mask_mod, B, H, 128, 300)."
)


SWAPPED = (
    "query [1, 128, 6, 8] and key [1, 128, 2, 8] have the lengths of block_mask, 128 and 128, in "
    "dimension 1, where heads belong: attention takes [batch, heads, length, head_dim]. Pass "
    "query.transpose(1, 2), and key and value likewise."
)


def test_heads_and_length_swapped_under_a_mask_was_told_as_a_matter_of_the_mask():
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    q, k = zeros(1, 6, 128, 8), zeros(1, 2, 128, 8)
    swapped_q, swapped_k = q.transpose(1, 2), k.transpose(1, 2)
    with pytest.raises(ShapeError) as caught:
        flex_attention(swapped_q, swapped_k, swapped_k, block_mask=mask, enable_gqa=True)
    assert str(caught.value) == SWAPPED
    again = swapped_q.transpose(1, 2), swapped_k.transpose(1, 2)
    flex_attention(again[0], again[1], again[1], block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(("lengths", "text"), [((64, 256), SMALLER), ((128, 300), LARGER)])
def test_mask_lengths(lengths, text):
    mask = create_block_mask(causal, None, None, 128, 256, device="cpu")
    q, k = zeros(1, 1, lengths[0], 8), zeros(1, 1, lengths[1], 8)
    with pytest.raises(ValueError) as caught:
        flex_attention(q, k, k, block_mask=mask)
    assert isinstance(caught.value, ShapeError)
    assert str(caught.value) == text


def test_the_advice_on_mask_lengths_works():
    mask = create_block_mask(causal, None, None, 128, 256, device="cpu")
    q, k = zeros(1, 1, 64, 8), zeros(1, 1, 256, 8)
    for fixed in (mask.crop(64, 256), mask.rows(10, 74)):
        assert flex_attention(q, k, k, block_mask=fixed).shape == q.shape


@pytest.mark.parametrize(("sizes", "what"), [((3, None), "batch 3"), ((None, 4), "heads 4")])
def test_mask_batch_and_heads(sizes, what):
    def per_entry(b, h, q_idx, kv_idx):
        return q_idx + b + h >= kv_idx

    mask = create_block_mask(per_entry, *sizes, 16, 16, device="cpu")
    q = zeros(2, 2, 16, 8)
    with pytest.raises(ShapeError, match=f"block_mask was made for {what}, query has 2"):
        flex_attention(q, q, q, block_mask=mask)


@pytest.mark.parametrize(
    ("mask", "advice"),
    [
        (causal, r"Pass create_block_mask\(mask_mod, B, H, Q_LEN, KV_LEN\) instead"),
        (torch.ones(4, 4, dtype=torch.bool), r"attnloom.BlockMask.from_dense\(mask\)"),
        (3, "Build one with attnloom.create_block_mask"),
    ],
)
def test_mask_of_the_wrong_type(mask, advice):
    q = zeros(1, 1, 4, 8)
    with pytest.raises(OptionError, match=advice):
        flex_attention(q, q, q, block_mask=mask)


def test_mask_of_torch_says_how_to_get_ours():
    from torch.nn.attention import flex_attention as torchs

    mask = torchs.create_block_mask(causal, None, None, 128, 128, device="cpu")
    q = zeros(1, 1, 128, 8)
    with pytest.raises(OptionError, match="Import create_block_mask from attnloom instead"):
        flex_attention(q, q, q, block_mask=mask)


def test_score_mod_must_be_callable():
    q = zeros(1, 1, 4, 8)
    with pytest.raises(OptionError, match="score_mod is a float; it must be a function"):
        flex_attention(q, q, q, 0.5)


def test_return_lse_with_return_aux():
    q = zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="return_lse and return_aux are both given"):
        flex_attention(q, q, q, return_lse=True, return_aux=attnloom.AuxRequest(lse=True))


def test_nothing_runs_before_an_error(monkeypatch):
    """Errors of a call's arguments come before the mod is traced."""

    def never(*_):
        raise AssertionError("the mod was called")

    with pytest.raises(ShapeError):
        flex_attention(zeros(1, 2, 3, 4), zeros(1, 2, 3, 5), zeros(1, 2, 3, 5), never)
