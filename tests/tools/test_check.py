"""attnloom.check_mod: passes what is right, and is seen to fail on what is planted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnloom
from attnloom.errors import ShapeError
from attnloom.tools import checking
from attnloom.tools.budget import judge
from attnloom.tools.names import tensor_names
from tests.tools import mods

SMALL = {"q_len": 72, "head_dim": 16, "batch": 1}


def names(found):
    return [r.name for r in found.results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_right_mods_pass(dtype):
    found = attnloom.check_mod(mods.learned, mods.window(20), dtype=dtype, **SMALL)
    assert found.passed, [r.problem for r in found.results]
    assert names(found) == ["out", "lse", "dq", "dk", "dv", "d_bias"]
    assert found.names == ("learned", "window.mask_mod")


def test_parameters_of_modules_are_checked():
    found = attnloom.check_mod(mods.layer.score_mod, heads=4, kv_heads=2, **SMALL)
    assert found.passed
    assert names(found)[5:] == ["d_self.table"]  # the unused parameter is no result
    assert mods.layer.table.dtype is torch.float32
    assert mods.layer.table.grad is None


def test_mask_alone_with_empty_rows():
    def late(b, h, q_idx, kv_idx):
        return (q_idx > 10) & (kv_idx <= q_idx)

    assert attnloom.check_mod(None, late, **SMALL).passed


def _planted(monkeypatch, change):
    real = checking.flex_attention

    def wrong(q, k, v, score_mod, block_mask, **options):
        return change(real, q, k, v, score_mod, block_mask, options)

    monkeypatch.setattr(checking, "flex_attention", wrong)


def test_a_scale_one_percent_off_fails(monkeypatch):
    def change(real, q, k, v, score_mod, block_mask, options):
        return real(q, k, v, score_mod, block_mask, scale=1.01 * q.size(-1) ** -0.5, **options)

    _planted(monkeypatch, change)
    found = attnloom.check_mod(mods.learned, mods.window(20), dtype="bfloat16", **SMALL)
    assert not found.passed


def test_a_window_off_by_one_fails(monkeypatch):
    def change(real, q, k, v, score_mod, block_mask, options):
        mask = attnloom.create_block_mask(mods.window(21), None, None, 72, 72, BLOCK_SIZE=32)
        return real(q, k, v, score_mod, mask, **options)

    _planted(monkeypatch, change)
    found = attnloom.check_mod(None, mods.window(20), dtype="float16", **SMALL)
    assert not found.passed


def test_a_forgotten_captured_gradient_fails(monkeypatch):
    def change(real, q, k, v, score_mod, block_mask, options):
        detached = mods.bias.detach()

        def without(score, b, h, q_idx, kv_idx):
            score = score + detached[h, (q_idx - kv_idx).clamp(0, 32)]
            return 20 * torch.tanh(score / 20)

        return real(q, k, v, without, block_mask, **options)

    _planted(monkeypatch, change)
    found = attnloom.check_mod(mods.learned, mods.window(20), **SMALL)
    assert [r.name for r in found.results if not r.passed] == ["d_bias"]


def test_an_index_out_of_range_fails():
    found = attnloom.check_mod(mods.learned, heads=6, **SMALL)
    assert not found.passed
    assert "indexes captured tensor 'bias' of shape [4, 33] with 4" in found.out_of_range
    assert all(r.passed for r in found.results)


def test_too_many_scores():
    with pytest.raises(ShapeError, match="are 8388608 scores; the oracle holds each of them"):
        attnloom.check_mod(mods.learned, q_len=2048, batch=1)


def test_captured_tensors_in_dicts_lists_and_partials():
    held = {"near": [torch.ones(4, requires_grad=True)]}

    def mod(score, b, h, q_idx, kv_idx):
        return score * held["near"][0][h]

    found = attnloom.check_mod(mod, **SMALL)
    assert found.passed
    assert names(found)[5:] == ["d_held['near'][0]"]


def test_names_of_what_is_nowhere():
    table = torch.ones(3)
    assert tensor_names(lambda *_: table, [torch.ones(3), table]) == ("tensor0", "table")


def test_verdicts_on_values_that_are_not_finite():
    exact = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    bad = judge("lse", torch.tensor([1.0, 0.0]), exact.float(), exact)
    assert bad.problem == (
        "1 of 2 are not as finite as the oracle's, the first at [1]: 0.0 instead of -inf"
    )
    assert not judge("lse", torch.tensor([float("nan"), float("-inf")]), exact, exact).passed
    good = judge("lse", exact.float(), exact.float(), exact)
    assert good.passed
    assert dataclasses.replace(good, problem="x").passed is False
