"""attnloom.check_mod: passes what is right, and is seen to fail on what is planted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import attnloom
from attnloom import mods as variants
from attnloom.errors import ShapeError
from attnloom.tools import checking
from attnloom.tools.budget import judge
from attnloom.tools.setting import Defaults
from attnloom.trace.names import tensor_names
from tests.harness.devices import another_default_device
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


def test_another_default_device_changes_nothing():
    """Inputs were drawn on torch's default device by a generator of the CPU, which CUDA refuses."""
    with another_default_device():
        found = attnloom.check_mod(mods.cancels, mods.window(20), device="cpu", **SMALL)
    assert found.passed, [r.problem for r in found.results]


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
        attnloom.check_mod(mods.learned, q_len=2048, batch=1, heads=2)


def test_captured_tensors_in_dicts_lists_and_partials():
    held = {"near": [torch.ones(4, requires_grad=True)]}

    def mod(score, b, h, q_idx, kv_idx):
        return score * held["near"][0][h]

    found = attnloom.check_mod(mod, **SMALL)
    assert found.passed
    assert names(found)[5:] == ["d_held['near'][0]"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_gradient_whose_terms_cancel(dtype):
    """It is 0 but for rounding, so that its size says nothing about the error it may have."""
    found = attnloom.check_mod(mods.cancels, dtype=dtype)
    (tilt,) = (r for r in found.results if r.name == "d_tilt")
    assert tilt.passed, tilt.problem
    assert math.isnan(tilt.errors.gain)
    assert math.isinf(tilt.allowed.gain)
    # Far below what the terms would add up to without cancelling: 160 rows, half a unit each.
    assert 0 < tilt.allowed.largest < {"float32": 0.01, "bfloat16": 2, "float64": 0.01}[dtype]


def test_a_wrong_gradient_whose_terms_cancel_fails(monkeypatch):
    def change(real, q, k, v, score_mod, block_mask, options):
        def off_by_a_row(score, b, h, q_idx, kv_idx):
            return score + mods.tilt[h] * (1 - 2 * ((q_idx.clamp(min=1)) % 2))

        return real(q, k, v, off_by_a_row, block_mask, **options)

    _planted(monkeypatch, change)
    found = attnloom.check_mod(mods.cancels)
    assert [r.name for r in found.results if not r.passed] == ["d_tilt"]


def test_a_captured_tensor_without_effect():
    held = torch.ones(3, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx < 0, held[h], score)

    found = attnloom.check_mod(mod, **SMALL)
    (held_result,) = (r for r in found.results if r.name == "d_held")
    assert held_result.passed
    assert held_result.allowed.largest == held_result.errors.largest == 0


def test_sizes_that_captured_tensors_tell():
    slope, prefix = torch.ones(5, 2), torch.tensor([3, 4, 5])

    def score(score, b, h, q_idx, kv_idx):
        return score * slope[h, q_idx % 2]

    def mask(b, h, q_idx, kv_idx):
        return kv_idx < prefix[b.long()] + q_idx

    found = attnloom.check_mod(score, mask, q_len=40, head_dim=16)
    assert (found.setting.batch, found.setting.heads, found.setting.kv_heads) == (3, 5, 5)
    assert found.setting.notes == (
        "heads is 5, as slope[h, ...] has that length; --heads says otherwise",
        "batch is 3, as prefix[b] has that length; --batch says otherwise",
    )
    given = attnloom.explain(score, mask, heads=2, batch=1, q_len=64, measure=False).setting
    assert (given.batch, given.heads, given.notes) == (1, 2, ())


def test_sizes_told_twice_and_not_at_all():
    short, long = torch.ones(4), torch.ones(6)

    def told(score, b, h, q_idx, kv_idx):
        return score + short[h] + long[h]

    def shared(score, b, h, q_idx, kv_idx):
        return score + short[h // 2] + long[(h + 1) % 6]

    def heads(mod):
        return attnloom.explain(mod, q_len=64, measure=False).setting.heads

    assert heads(told) == 4  # every load is in range
    assert heads(shared) == 1
    with pytest.raises(ShapeError, match="heads is 4 and kv_heads 3; query heads must be"):
        attnloom.explain(told, kv_heads=3, measure=False)


def test_told_sizes_are_cut_to_what_the_oracle_holds(monkeypatch):
    scale = torch.ones(600)

    def mod(score, b, h, q_idx, kv_idx):
        return score * scale[h]

    monkeypatch.setattr(checking, "_DEFAULTS", Defaults(160, 2, 2, 8 * 64 * 64))
    found = attnloom.check_mod(mod, q_len=64, head_dim=16, kv_heads=2)
    assert (found.setting.batch, found.setting.heads) == (2, 4)
    assert found.setting.notes == (
        "heads is 4, and could be 600, since scale[h] has that length; --heads says otherwise",
    )


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


IDS = torch.arange(700) // 100


def same_document(b, h, q_idx, kv_idx):
    return IDS[q_idx] == IDS[kv_idx]


@pytest.mark.parametrize(
    ("mods_", "given", "explained", "checked"),
    [
        # a canvas is exact, whatever the default
        ((None, variants.neighborhood((12, 14), 3)), {}, (168, 168), (168, 168)),
        ((None, same_document), {}, (700, 700), (160, 160)),
        ((variants.additive_bias(torch.zeros(60, 90)), None), {}, (60, 90), (60, 90)),
        # one length stands for the other; a given q_len is kv_len too
        ((None, variants.key_padding(torch.ones(77).bool())), {}, (77, 77), (77, 77)),
        ((None, same_document), {"q_len": 50}, (50, 50), (50, 50)),
        ((None, same_document), {"kv_len": 50}, (700, 50), (700, 50)),
        ((None, variants.causal_mask), {}, (2048, 2048), (160, 160)),
    ],
)
def test_lengths_are_told_by_captured_tensors_and_factories(mods_, given, explained, checked):
    """A factory's canvas or ids of other lengths than the default were refused."""
    setting = attnloom.explain(*mods_, measure=False, **given).setting
    assert (setting.q_len, setting.kv_len) == explained
    setting = attnloom.check_mod(*mods_, **given).setting
    assert (setting.q_len, setting.kv_len) == checked


def test_told_lengths_are_noted():
    def notes(mod):
        return attnloom.explain(mask_mod=mod, measure=False).setting.notes

    canvas = "as neighborhood: canvas is (12, 14)"
    assert notes(variants.neighborhood((12, 14), 3)) == (
        f"q_len is 168, {canvas}",
        f"kv_len is 168, {canvas}",
    )
    assert notes(same_document) == (
        "q_len is 700, as IDS[q_idx] has that length; --q-len says otherwise",
        "kv_len is 700, as IDS[kv_idx] has that length; --kv-len says otherwise",
    )
    assert attnloom.check_mod(mask_mod=same_document).setting.notes == (
        "q_len is 160, and could be 700, since IDS[q_idx] has that length; --q-len says otherwise",
        "kv_len is 160, and could be 700, since IDS[kv_idx] has that length; --kv-len says "
        "otherwise",
    )


def test_check_left_out_what_captured_tensors_told_of_lengths():
    """It took 160 tokens of 277, and so never saw the last documents."""
    ids = torch.arange(277) // 90

    def documents(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    found = attnloom.check_mod(mask_mod=documents, head_dim=16)
    assert (found.setting.q_len, found.setting.kv_len) == (277, 277)
    assert "q_len is 277, as ids[q_idx] has that length" in found.setting.notes[0]


def test_float32_inside_a_float64_check_is_noted():
    table = torch.linspace(0, 1, 64)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx] + torch.log1p(kv_idx)

    def notes(mod, dtype):
        return attnloom.check_mod(mod, q_len=64, head_dim=16, dtype=dtype).setting.notes

    assert notes(mod, "float64") == (
        "dtype is float64, but score_mod 'test_float32_inside_a_float64_check_is_noted.mod' "
        "computes in float32 what it makes of table and of integers alone, as torch does; "
        ".double() there makes it float64",
    )
    assert notes(mod, "float32") == ()
    wide = table.double()
    assert notes(lambda s, b, h, q, kv: s + wide[q] + torch.log1p(kv.double()), "float64") == ()


def test_an_index_that_only_long_distances_reach():
    """Values are compared on 160 of 2048 tokens, where no distance came to the end of the table."""
    documents, bias = torch.arange(2048) // 500, torch.zeros(2, 200)

    def mask_mod(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= 256) & (documents[q_idx] == documents[kv_idx])

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, (q_idx - kv_idx).clamp(0, 256)]

    found = attnloom.check_mod(score_mod, mask_mod, head_dim=8)
    assert found.setting.q_len == 160
    assert (found.indices_at.q_len, found.indices_at.heads) == (2048, 2)
    assert "'bias' of shape [2, 200] with 200 in dimension 1" in found.out_of_range
    assert not found.passed
    assert all(r.passed for r in found.results)
    small = attnloom.check_mod(score_mod, mask_mod, q_len=64, head_dim=8)
    assert small.indices_at == small.setting and small.passed


def test_one_rounding_of_a_row_was_taken_for_a_gain():
    """A gradient of a score is rounded to half precision, then multiplies a row of a query."""
    rows = torch.zeros(1, 1, 400, 64, dtype=torch.float64)
    rows[0, 0, 0] = torch.linspace(1, 2, 64)
    signs = 1 - 2 * (torch.arange(64) % 2)

    def off(name, by, exact):
        rough = exact * (1 + 0.003 * signs)
        return judge(name, (exact * (1 + by)).bfloat16(), rough.bfloat16(), exact)

    assert off("dk", 0.003, rows).passed
    assert "gain" in off("d_table", 0.003, rows).problem
    assert "gain" in off("dk", 0.01, rows).problem
    assert "gain" in off("dk", 0.003, rows[:, :, :1].expand(1, 1, 400, 64)).problem
