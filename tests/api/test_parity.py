"""Side by side with torch.nn.attention.flex_attention: signatures, defaults, forms, results."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import attnloom
from tests.api.mods import causal, late_start, qkv, slope_bias, soft_cap


@pytest.fixture(autouse=True)
def _torch_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def test_all_public_names_exist():
    assert set(torchs.__all__) <= set(attnloom.__all__)


@pytest.mark.parametrize(
    "name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks"]
)
def test_signatures(name):
    def shape(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    ours, theirs = shape(getattr(attnloom, name)), shape(getattr(torchs, name))
    if name == "flex_attention":  # a cache in place of key brings its values along
        ours[2] = (*ours[2][:2], inspect.Parameter.empty)
        added = [p for p in ours if p[0] in ("q_descale", "k_descale", "v_descale")]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in added)
        ours = [p for p in ours if p not in added]
    assert ours == theirs


@pytest.mark.parametrize("name", ["AuxRequest", "AuxOutput"])
def test_named_tuples(name):
    ours, theirs = getattr(attnloom, name), getattr(torchs, name)
    assert ours._fields == theirs._fields
    assert ours._field_defaults == theirs._field_defaults


CASES = {
    "plain": (None, None),
    "causal": (None, causal),
    "slope": (slope_bias(torch.linspace(0.1, 0.4, 4)), None),
    "cap, rows without keys": (soft_cap(2.0), late_start),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results(name, dtype):
    score_mod, mask_mod = CASES[name]
    inputs = qkv(lengths=(40, 150), head_dim=16, dtype=dtype)
    results = []
    for module in (attnloom, torchs):
        mask = None
        if mask_mod is not None:
            mask = module.create_block_mask(mask_mod, None, None, 40, 150, device="cpu")
        results.append(
            module.flex_attention(
                *inputs, score_mod, mask, enable_gqa=True, return_aux=module.AuxRequest(lse=True)
            )
        )
    (out, aux), (want_out, want_aux) = results
    torch.testing.assert_close(out, want_out.to(dtype), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(aux.lse, want_aux.lse.to(aux.lse.dtype), atol=2e-5, rtol=2e-5)
    assert aux.max_scores is None is want_aux.max_scores
    assert out.shape == want_out.shape
    assert out.dtype == want_out.dtype


def test_scale_multiplies_before_the_mod():
    inputs = qkv(key_heads=4, head_dim=16, dtype=torch.float32)
    ours, theirs = (
        module.flex_attention(*inputs, soft_cap(1.0), scale=0.7) for module in (attnloom, torchs)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": (1, 3, 4, 8)},
        {"key": (1, 2, 4, 16)},
        {"query": (2, 2, 4, 8)},
    ],
)
def test_both_refuse_with_a_value_error(arguments):
    shapes = {"query": (1, 2, 4, 8), "key": (1, 2, 4, 8), "value": (1, 2, 4, 8)} | arguments
    if arguments.get("query") == (2, 2, 4, 8):
        shapes["key"] = shapes["value"] = (3, 2, 4, 8)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for module in (attnloom, torchs):
        with pytest.raises(ValueError):
            module.flex_attention(**tensors)


def test_return_lse_form_and_warning(monkeypatch):
    from attnloom.api import attention

    monkeypatch.setattr(attention, "_shown", set())
    inputs = qkv(key_heads=4)
    with pytest.warns(FutureWarning, match="return_lse is deprecated"):
        out, lse = attnloom.flex_attention(*inputs, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 4, 5, 4), (2, 4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnloom.flex_attention(*inputs, return_lse=True)


@pytest.mark.parametrize("combine", ["and_masks", "or_masks"])
def test_masks_combined_by_torch_are_traced(combine):
    """torch's own and_masks and or_masks start from Tensor.new_ones and new_zeros."""

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 5

    theirs = attnloom.create_block_mask(getattr(torchs, combine)(causal, near), None, None, 40, 40)
    ours = attnloom.create_block_mask(getattr(attnloom, combine)(causal, near), None, None, 40, 40)
    assert torch.equal(theirs.to_mask(), ours.to_mask())


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_masks_from_blocks_without_batch_or_heads_broadcast(leading):
    number = torch.tensor([1, 2], dtype=torch.int32).expand(*leading, 2)
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(*leading, 2, 2)
    mask = attnloom.BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=16)
    x = torch.randn(2, 3, 32, 8, generator=torch.Generator().manual_seed(0))
    out = attnloom.flex_attention(x, x, x, block_mask=mask)
    keep = (torch.arange(32)[:, None] // 16) >= (torch.arange(32)[None] // 16)
    want = torch.softmax((x @ x.mT / 8**0.5).masked_fill(~keep, -torch.inf), -1) @ x
    torch.testing.assert_close(out, want)
