"""How the CPU backend splits a call, and that every split gives the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnloom
from attnloom.backends.cpu import build, launch, schedule
from attnloom.backends.cpu.schedule import BackwardSchedule, Schedule, backward_schedule
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import BoundProgram, DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_score
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with

SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=200, KV_LEN=150, D=16, Dv=16)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small problems run on two threads."""
    monkeypatch.setattr(schedule, "num_threads", lambda _call: 2)
    monkeypatch.setattr(launch, "num_threads", lambda _call: 2)


def call_with(score: BoundProgram | None, B: int, Hq: int, Hkv: int, length: int) -> AttentionCall:
    query, key = torch.empty(B, Hq, length, 8), torch.empty(B, Hkv, length, 8)
    return AttentionCall(query, key, key, score, None, None, 1.0, KernelOptions())


Index = Callable[..., tuple[Any, ...]]


def planned(bias: torch.Tensor, index: Index, B: int, Hq: int, threads: int) -> BackwardSchedule:
    """The backward of `score + bias[index(b, h, q_idx, kv_idx)]` over 1024 tokens."""
    bias.requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[index(b, h, q_idx, kv_idx)]

    score = trace_score(score_mod, DType.F32, bias.device)
    return backward_schedule(call_with(score, B, Hq, Hq, 1024), threads)


def test_each_key_head_is_a_task_where_they_fill_the_threads() -> None:
    plan = backward_schedule(call_with(None, 1, 8, 8, 1024), 2)
    assert plan == BackwardSchedule(Schedule(2, 1, 1, num_lanes=8), {})


def test_rows_are_split_where_key_heads_are_too_few() -> None:
    plan = backward_schedule(call_with(None, 1, 3, 3, 1024), 2).schedule
    assert (plan.row_chunks, plan.head_chunks, plan.num_lanes) == (2, 1, 6)


def test_query_heads_are_split_where_rows_are_too_few() -> None:
    plan = backward_schedule(call_with(None, 1, 8, 1, 10), 4).schedule
    assert (plan.row_chunks, plan.head_chunks, plan.num_lanes) == (1, 4, 4)


def test_a_full_bias_needs_one_buffer() -> None:
    assert planned(
        torch.zeros(2, 4, 1024, 1024), lambda b, h, q, kv: (b, h, q, kv), 2, 4, 2
    ).copies == {0: 1}


def test_a_bias_of_each_head_needs_one_buffer_if_tasks_are_heads() -> None:
    plan = planned(torch.zeros(4, 2047), lambda b, h, q, kv: (h, q - kv + 1023), 1, 4, 2)
    assert (plan.copies, plan.schedule.num_lanes, plan.schedule.row_chunks) == ({0: 1}, 4, 1)


def test_a_bias_of_pairs_is_split_by_rows() -> None:
    plan = planned(torch.zeros(1024, 1024), lambda b, h, q, kv: (q, kv), 2, 4, 2)
    assert plan.copies == {0: 1}
    assert plan.schedule.num_lanes == plan.schedule.row_chunks > 1


def test_a_shared_table_is_copied_for_each_lane() -> None:
    plan = planned(torch.zeros(2047), lambda b, h, q, kv: (q - kv + 1023,), 2, 4, 2)
    assert plan.copies == {0: plan.schedule.num_lanes}
    assert plan.schedule.num_lanes >= 2


def test_copies_of_large_tables_are_bounded() -> None:
    plan = planned(torch.zeros(1 << 25), lambda b, h, q, kv: (q + kv,), 1, 4, 64)
    assert plan.copies == {0: 1}
    assert plan.schedule.num_lanes == 1


def test_a_dimension_shorter_than_its_axis_is_clamped_so_rows_share_elements() -> None:
    plan = planned(torch.zeros(2, 4, 1000, 1024), lambda b, h, q, kv: (b, h, q, kv), 2, 4, 2)
    assert plan.schedule.row_chunks == 1


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "mod", ["relative_bias", "full_bias", "pair_bias", "captured_twice", "head_slope", "t5_bias"]
)
def test_gradients_of_captured_tensors_under_each_split(mod: str) -> None:
    check_attention(Case(mod, SIZES, torch.float32), attnloom_with(backend="cpu"))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kv_batch", [1, 2])
@pytest.mark.parametrize(("row_chunks", "head_chunks"), [(1, 3), (4, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_of_a_key_head_add_up(
    row_chunks: int,
    head_chunks: int,
    kv_batch: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = kv_batch * SIZES.Hkv * row_chunks * head_chunks
    forced = BackwardSchedule(Schedule(2, row_chunks, head_chunks, lanes), {})
    monkeypatch.setattr(launch, "backward_schedule", lambda *_: forced)
    case = Case("causal", SIZES, dtype, kv_batch=kv_batch)
    check_attention(case, attnloom_with(backend="cpu"))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mod", ["plain", "causal", "document"])
@pytest.mark.parametrize("kv_batch", [1, 2])
def test_kv_heads_packed_in_several_waves(
    mod: str, kv_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SmallWaves(build.KernelSpec):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            object.__setattr__(self, "defines", (*self.defines, ("WAVE_BYTES", 1)))

    monkeypatch.setattr(build, "KernelSpec", SmallWaves)
    monkeypatch.setattr(launch, "_kernels", {})
    sizes = replace(SIZES, Hq=6, Hkv=3)
    case = Case(mod, sizes, torch.float32, kv_batch=kv_batch)
    check_attention(case, attnloom_with(backend="cpu"), backward=False)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("splits", [1, 2, 5, 9])
@pytest.mark.parametrize("mod", ["causal_lower_right", "sliding_window"])
def test_decode_parts_combine(mod: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = functools.partial(Schedule, 2, num_splits=splits, fold=2)
    monkeypatch.setattr(launch, "decode_schedule", lambda *_: forced())
    case = Case(mod, replace(SIZES, Q_LEN=3, KV_LEN=300), torch.float32)
    check_attention(case, attnloom_with(backend="cpu"), backward=False)


def gradients(seed: int) -> list[torch.Tensor]:
    """Gradients of one problem whose captured tensors take every way out of a tile."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    query, key, value = leaf(1, 3, 500, 32), leaf(1, 3, 500, 32), leaf(1, 3, 500, 32)
    slope, table, pairs = leaf(3), leaf(999), leaf(500, 500)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slope[h] * kv_idx + table[q_idx - kv_idx + 499] + pairs[q_idx, kv_idx]

    out = attnloom.flex_attention(query, key, value, score_mod)
    leaves = (query, key, value, slope, table, pairs)
    return list(torch.autograd.grad(out.square().sum(), leaves))


def test_gradients_repeat_bit_for_bit() -> None:
    first = gradients(0)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(0), strict=True))
