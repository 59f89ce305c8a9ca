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
from attnloom.backends.gluon import launch_forward
from attnloom.backends.gluon.configs_forward import Form
from attnloom.backends.gluon.fields_forward import config_of

CPU = torch.device("cpu")
LENGTH = 1024
IDS = torch.arange(LENGTH) // 900


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


def capped(score, b, h, q, kv):
    return 30 * torch.tanh(score / 30)


def call_of(D: int, mask: Any = None, score: Any = None, Dv: int | None = None) -> AttentionCall:
    sizes = D, D, Dv or D
    tensors = (torch.empty(2, 4, LENGTH, n, dtype=torch.float16) for n in sizes)
    made = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu") if mask else None
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


@pytest.mark.parametrize("mask", [None, causal])
@pytest.mark.parametrize("D", [96, 128, 136, 192])
def test_queries_in_registers_leave_their_tile_to_the_next(D: int, mask: Any) -> None:
    first, *others = in_order(call_of(D, mask))
    assert (first.q_kept, first.q_stages, first.out_in_q) == (first.panels, 1, False)
    assert others
    assert not any(form.q_kept for form in others)


def test_masks_have_sums_a_lane_and_keys_ahead_where_that_gained() -> None:
    found = {mask: in_order(call_of(128, mask))[0] for mask in (None, causal)}
    assert [(form.ahead, form.by_lane) for form in found.values()] == [(False, False), (True, True)]
    assert not any(in_order(call_of(D, causal))[0].ahead for D in (64, 192, 256))


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
    assert launch_forward._heads_together(call, H200) == heads


@pytest.mark.parametrize("mask", [None, causal])
def test_only_heads_of_129_to_192_let_weights_exceed_one(mask: Any) -> None:
    slack = {D: in_order(call_of(D, mask))[0].slack for D in (64, 128, 136, 192, 200, 256)}
    assert slack == {64: None, 128: None, 136: 8.0, 192: 8.0, 200: 0.0, 256: 0.0}
    assert in_order(call_of(192, mask, Dv=128))[0].slack == 0.0


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize(("mask", "score"), [(documents, None), (causal, capped), (None, capped)])
def test_mods_that_nobody_timed_so_have_the_other_forms(D: int, mask: Any, score: Any) -> None:
    first = in_order(call_of(D, mask, score))[0]
    assert (first.q_kept, first.slack, first.late, first.by_lane) == (0, None, False, False)


def test_maxima_that_are_asked_for_are_exact() -> None:
    call = call_of(192, causal)
    with device_is("sm_90"):
        form = in_order(call)[0]
        configs = [config_of(call, form, None, wanted) for wanted in (False, True)]
    assert [config.SLACK for config in configs] == [8.0, 0.0]
