"""The oracle itself: against torch, against one call per score, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attnloom.backends.reference import (
    evaluate_lanes,
    lanes,
    reference_attention,
    reference_forward,
)
from attnloom.block_mask import BlockLists
from attnloom.errors import ShapeError, UnsupportedError
from tests.harness.case import Case, draw_problem
from tests.harness.draw import Sizes
from tests.harness.implementations import one_thread
from tests.harness.mods import MODS

SMALL = Sizes(B=2, Hq=2, Hkv=1, Q_LEN=9, KV_LEN=11, D=4, Dv=3)
# torch runs these mods under vmap, which refuses Python control flow.
BRANCHING = {"ternary", "if_statement", "builtin_min_max", "prefix_or"}


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def every_lane(s: Sizes) -> tuple[torch.Tensor, ...]:
    return torch.ones(s.B, s.Hq, s.Q_LEN, s.KV_LEN).nonzero(as_tuple=True)


@pytest.mark.parametrize("name", MODS)
def test_lanes_equal_one_call_per_score(name: str) -> None:
    """Whatever route a mod takes, each score must be what a plain Python call gives for it."""
    problem = draw_problem(Case(name, SMALL, torch.float64))
    score_mod, mask_mod = problem.mods
    at = every_lane(SMALL)
    scores = torch.randn(at[0].shape, dtype=torch.float64)
    for mod, args in ((score_mod, (scores, *at)), (mask_mod, at)):
        if mod is None or name in ("document_relative_softcap", "singular_where_masked"):
            continue  # these index out of range, or are NaN, where their mask is false
        got = evaluate_lanes(mod, *args).detach()
        one_by_one = [torch.as_tensor(mod(*lane)).detach() for lane in zip(*args, strict=True)]
        assert torch.equal(got, torch.stack(one_by_one))


@pytest.mark.parametrize("name", sorted(set(MODS) - BRANCHING))
def test_agrees_with_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw_problem(Case(name, SMALL, torch.float64))
    score_mod, mask_mod = problem.mods
    mask = None
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(
            mask_mod, SMALL.B, SMALL.Hq, SMALL.Q_LEN, SMALL.KV_LEN, device="cpu"
        )
    # By default torch compiles its function for every mod, for the same operators.
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = (x.detach() for x in (problem.query, problem.key, problem.value))
    if name in ("document_relative_softcap", "singular_where_masked"):
        score_mod = None  # torch evaluates the mod where the mask is false
    with torch.no_grad():
        expected = torch_flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
        out, _, _ = reference_attention(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["causal_head_slope", "rbf_bias", "if_statement", "left_padding"])
def test_gradients_by_finite_differences(name: str) -> None:
    sizes = Sizes(B=2, Hq=2, Hkv=1, Q_LEN=4, KV_LEN=5, D=3, Dv=2)
    problem = draw_problem(Case(name, sizes, torch.float64))
    row = MODS[name]

    def attention(q, k, v, *learned):
        captures = {**problem.captures, **dict(zip(row.learnable, learned, strict=True))}
        score_mod, mask_mod = row.build(captures, sizes)
        out, lse, _ = reference_attention(q, k, v, score_mod, mask_mod)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    assert torch.autograd.gradcheck(attention, tuple(problem.leaves.values()))


def test_lse_and_max_scores_by_hand() -> None:
    problem = draw_problem(Case("causal", SMALL, torch.float64))
    q, k = problem.query, problem.key.expand(-1, SMALL.Hq, -1, -1)
    scores = (q @ k.mT * 0.3).masked_fill(~torch.ones(9, 11).tril().bool(), -math.inf)
    _, lse, max_scores = reference_attention(
        q, problem.key, problem.value, None, problem.mods[1], 0.3
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(max_scores, scores.amax(-1))


@pytest.mark.parametrize("keys", [0, 11])
def test_empty_rows(keys: int) -> None:
    sizes = Sizes(B=2, Hq=2, Hkv=1, Q_LEN=9, KV_LEN=keys, D=4, Dv=3)
    problem = draw_problem(Case("nothing", sizes, torch.float64))
    q, k, v = problem.query, problem.key, problem.value
    out, lse, max_scores = reference_attention(q, k, v, None, problem.mods[1])
    assert out.shape == (2, 2, 9, 3)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert (max_scores == -math.inf).all()
    for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)):
        assert not grad.any()


def test_mod_that_is_singular_where_masked_has_finite_gradients() -> None:
    problem = draw_problem(Case("singular_where_masked", SMALL, torch.float64))
    score_mod, mask_mod = problem.mods
    out, _, _ = reference_attention(problem.query, problem.key, problem.value, score_mod, mask_mod)
    for grad in torch.autograd.grad(out.sum(), list(problem.leaves.values())):
        assert torch.isfinite(grad).all()


def test_serial_fallback_handles_item_and_list_lookup() -> None:
    table = [0.0, 1.5, -2.0]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[int(kv_idx) % 3] * q_idx.item()

    at = every_lane(SMALL)
    got = evaluate_lanes(score_mod, torch.zeros(at[0].shape, dtype=torch.float64), *at)
    expected = torch.tensor(table, dtype=torch.float64)[at[3] % 3] * at[2]
    torch.testing.assert_close(got, expected)


def test_too_many_scores_for_the_serial_fallback_is_an_error() -> None:
    lanes = torch.arange(70_000)
    with pytest.raises(UnsupportedError, match="only one score at a time"):
        evaluate_lanes(lambda q: q.item() > 3, lanes)


@pytest.mark.parametrize("index", [-1, -9, -10, 8, 9, 1000])
def test_out_of_range_index_wraps_then_clamps(index: int) -> None:
    table = torch.arange(9.0)
    got = evaluate_lanes(lambda q: table[q + index], torch.zeros(3, dtype=torch.int64))
    wrapped = index + 9 if index < 0 else index
    assert got.tolist() == [float(min(max(wrapped, 0), 8))] * 3


def test_lookup_forms() -> None:
    table = torch.randn(3, 4, 5, 6)
    a, b = torch.tensor([0, 1, 2, 2]), torch.tensor([4, 0, 3, 1])
    mask = torch.arange(6) < 3
    cases = {
        "mixed with int": (lambda i, j: table[i, 1, j, 2], table[a, 1, b, 2]),
        "slice": (lambda i, j: table[i, 1:, j].sum(), table[a, 1:, b].sum((1, 2))),
        "ellipsis": (lambda i, j: table[i, ..., j].sum(), table[a, ..., b].sum((1, 2))),
        "none": (lambda i, j: table[None, i, 0, j, 0][0], table[a, 0, b, 0]),
        "chained": (lambda i, j: table[i][2][j, -1], table[a, 2, b, -1]),
        "chained slice": (
            lambda i, j: table[i][:, 1:][2, j].sum(),
            table[a, 2, 1 + b.clamp(max=3)].sum(-1),
        ),
        "chained ellipsis": (lambda i, j: table[i][..., j, :][1].sum(), table[a, 1, b].sum(-1)),
        "chained none": (lambda i, j: table[i][None][0, 1, j, 2], table[a, 1, b, 2]),
        "chained mask": (lambda i, j: table[i, 1, j][mask].sum(), table[a, 1, b, :3].sum(-1)),
        "row as argument": (
            lambda i, j: torch.stack([table[i, 0, j], table[i, 1, j]]).sum(),
            table[a, :2, b].sum((1, 2)),
        ),
        "row of a row": (lambda i, j: table[i, 0, j].view(2, 3)[1, -1], table[a, 0, b, -1]),
        "unpacked": (lambda i, j: sum(row[j, 0] for row in table[i]), table[a, :, b, 0].sum(1)),
        "length": (lambda i, j: table[i, 0][j].shape[0] + len(table[i]) + 0 * i, a * 0 + 10),
        "negative": (lambda i, j: table[-i, 0, -j, 0], table[-a, 0, -b, 0]),
    }
    for name, (mod, expected) in cases.items():
        torch.testing.assert_close(evaluate_lanes(mod, a, b), expected, msg=name)


def test_too_many_indices_of_a_row_are_refused() -> None:
    table = torch.randn(3, 4)
    with pytest.raises(IndexError, match="too many indices for a tensor of dimension 1: 2"):
        evaluate_lanes(lambda i: table[i][i, 0], torch.arange(3))


def test_narrow_chunks_agree_with_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw_problem(Case("low_rank_dot", SMALL, torch.float64))
    args = problem.query, problem.key, problem.value, problem.mods[0]
    whole, _, _ = reference_attention(*args)
    monkeypatch.setattr("attnloom.backends.reference.lanes.MAX_ELEMENTS", 500)
    pieces, _, _ = reference_attention(*args)
    assert torch.equal(whole, pieces)


def test_a_chained_lookup_gathered_a_row_for_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bias[b][h][q, kv]` was gathered as [H, Q, KV] elements a score, minutes of every test."""
    problem = draw_problem(Case("chained_bias", SMALL, torch.float64))
    args = problem.query, problem.key, problem.value, problem.mods[0]
    num_scores = problem.captures["bias"].numel()
    monkeypatch.setattr(lanes, "MAX_ELEMENTS", num_scores)
    widths: list[int] = []
    run = lanes._run
    monkeypatch.setattr(lanes, "_run", lambda mod, at: widths.append(len(at[0])) or run(mod, at))
    reference_attention(*args)
    assert widths == [num_scores]


def test_block_lists_are_obeyed() -> None:
    """Full tiles ignore the mod, absent tiles stay dark, partial tiles see shifted positions."""
    lists = BlockLists(
        row_offsets=torch.tensor([0, 2, 3]),
        entries=torch.tensor([0 * 2, 1 * 2 + 1, 1 * 2 + 1], dtype=torch.int32),
        num_batches=1, num_heads=1, q_block=16, kv_block=16, q_len=20, kv_len=30, q_offset=5,
        kv_offset=2,
    )  # fmt: skip
    sizes = Sizes(B=2, Hq=2, Hkv=1, Q_LEN=20, KV_LEN=30, D=4, Dv=3)
    problem = draw_problem(Case("plain", sizes, torch.float64))
    q, k, v = problem.query, problem.key, problem.value
    result = reference_forward(q, k, v, None, lambda b, h, i, j: i >= j, lists, None)
    live = torch.zeros(20, 30, dtype=torch.bool)
    i, j = torch.arange(20)[:, None] + 5, torch.arange(30) + 2
    live[:16, :16] = True
    live[:, 16:] = (i >= j)[:, 16:]
    expected, lse, _ = reference_attention(q, k, v, None, lambda b, h, i, j: live[i, j])
    torch.testing.assert_close(result.out, expected)
    torch.testing.assert_close(result.lse, lse)


def test_forward_returns_the_callers_dtype() -> None:
    problem = draw_problem(Case("plain", SMALL, torch.bfloat16))
    result = reference_forward(problem.query, problem.key, problem.value, None, None, None, None)
    assert result.out.dtype == torch.bfloat16
    assert result.lse.dtype == torch.float32


def test_shape_errors_name_the_shapes() -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 2, 5, 4)
    with pytest.raises(ShapeError, match=r"3 heads, key has 2.*\[2, 3, 5, 4\]"):
        reference_attention(q, k, k)
    with pytest.raises(ShapeError, match="enable_gqa"):
        reference_attention(torch.randn(2, 4, 5, 4), k, k, enable_gqa=False)
