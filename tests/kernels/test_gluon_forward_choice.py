"""Which forms the Gluon forward has for calls without a score_mod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnloom import create_block_mask
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton.configs import Device
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import device_is

pytest.importorskip("triton.experimental.gluon")
from attnloom.backends.gluon import launch_forward, ready_forward
from attnloom.backends.gluon.configs_forward import Form

CPU = torch.device("cpu")
LENGTH = 1024
IDS = torch.arange(LENGTH) // 900
DIMS = (64, 96, 128, 192, 256)


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


def capped(score, b, h, q, kv):
    return 30 * torch.tanh(score / 30)


def call_of(
    D: int, mask: Any = None, score: Any = None, Dv: int | None = None, length: int = LENGTH
) -> AttentionCall:
    sizes = D, D, Dv or D
    tensors = (torch.empty(2, 4, length, n, dtype=torch.float16) for n in sizes)
    made = create_block_mask(mask, None, None, length, length, "cpu") if mask else None
    return AttentionCall(
        *tensors,
        trace_score(score, DType.F32, CPU) if score else None,
        trace_mask(mask, CPU) if mask else None,
        made.lists() if made else None,
        D**-0.5,
        KernelOptions(),
    )


def in_order(call: AttentionCall) -> tuple[Form, ...]:
    with device_is("sm_90"):
        return launch_forward._in_order(call, True)


def first(D: int, mask: Any, score: Any = None) -> Form:
    """For rows of many steps."""
    return in_order(call_of(D, mask, score, length=8 * LENGTH))[0]


@pytest.mark.parametrize("mask", [None, causal])
@pytest.mark.parametrize("D", [96, 128, 136, 192])
def test_queries_in_registers_leave_their_tile_to_the_next(D: int, mask: Any) -> None:
    first, *others = in_order(call_of(D, mask))
    assert (first.q_kept, first.q_stages, first.out_in_q) == (first.panels, 1, False)
    assert others
    assert not any(form.q_kept for form in others)


def test_keys_are_waited_for_ahead_where_that_gained() -> None:
    ahead = {D: [first(D, mask).ahead for mask in (None, causal)] for D in DIMS}
    assert ahead == {D: [D not in (128, 256), True] for D in DIMS}


@pytest.mark.parametrize("mask", [None, causal])
def test_slots_have_named_barriers_where_that_gained(mask: Any) -> None:
    named = {D for D in DIMS if first(D, mask).named}
    assert named == {128, 192, 256}
    scored = {D for D in DIMS if first(D, mask, capped).named}
    assert scored == {96, 128, 192, 256}


@pytest.mark.parametrize(
    ("D", "Dv", "mask", "rest"),
    [(96, 96, causal, 32), (96, 96, None, 32), (72, 96, causal, 16), (96, 128, causal, 0),
     (64, 96, causal, 0), (104, 104, None, 0)],
)  # fmt: skip
def test_scores_of_heads_of_65_to_96_leave_out_columns(
    D: int, Dv: int, mask: Any, rest: int
) -> None:
    first, *others = in_order(call_of(D, mask, Dv=Dv))
    assert first.rest(D) == rest
    assert not any(form.rest(D) for form in others)


H200 = Device(90, 232_448, 132, 60 << 20)


@pytest.mark.parametrize(
    ("mask", "group", "length", "heads"),
    [
        (None, 1, 8192, 4),  # keys and values of a head are 4 MiB
        (causal, 1, 8192, 16),
        (causal, 3, 8192, 15),
        (causal, 32, 8192, 128),
        (causal, 1, 512, 64),
    ],
)
def test_under_a_mask_more_heads_are_taken_together(
    mask: Any, group: int, length: int, heads: int
) -> None:
    query, key = (torch.empty(1, n, length, 128, dtype=torch.float16) for n in (group, 1))
    call = replace(call_of(128, mask), query=query, key=key, value=key)
    assert ready_forward._heads_together(call, H200) == heads


@pytest.mark.parametrize("mask", [None, causal])
def test_warps_leave_out_multiplications_by_one_where_that_gained(mask: Any) -> None:
    """At D=192 a weight could be up to 256 once, for 3 to 4% more error."""
    lazy = {D: first(D, mask).lazy for D in DIMS}
    assert lazy == {D: D != 128 for D in DIMS}


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize(("mask", "score"), [(documents, None), (causal, capped), (None, capped)])
def test_mods_that_nobody_timed_so_have_the_other_forms(D: int, mask: Any, score: Any) -> None:
    first = in_order(call_of(D, mask, score))[0]
    assert (first.q_kept, first.lazy, first.late, first.by_lane) == (0, False, False, False)
