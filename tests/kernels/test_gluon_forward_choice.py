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
from attnloom.backends.gluon.configs_forward import Form, quick

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
    found = in_order(call_of(D, mask))
    kept = [form for form in found if form.q_kept]
    assert {(form.q_stages, form.out_in_q) for form in kept} == {(1, False)}
    others = [form for form in found if form.wide and not form.q_kept and not form.strips]
    assert {(form.q_stages, form.out_in_q) for form in others} <= {(1, True)}
    assert not found[-1].q_kept


def test_keys_are_waited_for_ahead_where_that_gained() -> None:
    ahead = {D: [first(D, mask).ahead for mask in (None, causal)] for D in DIMS}
    assert ahead == {D: [D in (64, 192), True] for D in DIMS}


@pytest.mark.parametrize("mask", [None, causal])
def test_slots_have_named_barriers_where_that_gained(mask: Any) -> None:
    named = {D for D in DIMS if first(D, mask).named}
    assert named == ({96, 256} if mask is None else {96, 128, 256})
    by_warp = {D for D in DIMS if first(D, mask).by_warp}
    assert by_warp == ({64, 128, 192} if mask is None else {64, 192})
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
    found = in_order(call_of(D, mask, Dv=Dv, length=8 * LENGTH))
    assert found[0].rest(D) == rest
    assert {form.rest(D) for form in found} == {0, rest}
    assert not found[-1].rest(D)


@pytest.mark.parametrize(
    ("D", "mask", "wide"),
    [
        (96, causal, [("named", 2, 128), ("", 2, 128)]),
        (80, None, [("named", 3, 128), ("", 2, 128)]),
        (192, causal, [("", 2, 96), ("named", 2, 128), ("named", 2, 64)]),
        (192, None, [("", 2, 96), ("named", 2, 64)]),
        (144, None, [("named", 2, 64)]),
        (128, causal, []),
        (256, None, []),
    ],
)
def test_products_of_96_and_192_columns_come_first(D: int, mask: Any, wide: Any) -> None:
    """What follows has none, should a device or a compiler not take them."""
    found = in_order(call_of(D, mask, length=8 * LENGTH))
    here = [("named" * form.named, form.consumers, form.tile_n) for form in found if form.wide]
    assert here == wide
    assert [form.wide for form in found] == sorted((form.wide for form in found), reverse=True)
    assert not found[-1].wide


@pytest.mark.parametrize("D", [96, 144])
@pytest.mark.parametrize("mask", [None, causal])
def test_first_calls_multiply_64_or_128_columns_at_a_time(D: int, mask: Any) -> None:
    usual = first(D, mask)
    found = quick(usual)
    assert found is not None
    assert (usual.wide, found.wide) == (True, False)
    assert (found.tile_n, found.key_panels) == (usual.tile_n, usual.key_panels)


def test_blocks_of_64_keys_have_64_a_step() -> None:
    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=(128, 64))
    call = replace(call_of(144, causal), blocks=blocks.lists())
    assert [form.tile_n for form in in_order(call)] == [64] * 4
    assert in_order(call)[0].wide
    for wanted, length in (([64] * 4 + [96], LENGTH), ([96] + [64] * 4, 2 * LENGTH)):
        blocks = create_block_mask(causal, None, None, length, length, "cpu", BLOCK_SIZE=(128, 64))
        call = replace(call_of(192, causal, length=length), blocks=blocks.lists())
        assert [form.tile_n for form in in_order(call)] == wanted


H200 = Device(90, 232_448, 132, 60 << 20)


@pytest.mark.parametrize(
    ("mask", "group", "length", "heads"),
    [
        (None, 1, 8192, 4),  # keys and values of a head are 4 MiB
        (causal, 1, 8192, 8),
        (causal, 3, 8192, 12),
        (causal, 32, 8192, 128),
        (causal, 1, 512, 64),
        (causal, 1, 16_384, 4),
        (causal, 1, 32_768, 2),
        (causal, 3, 32_768, 3),
        (causal, 1, 2**20, 1),
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


def test_consumers_take_turns_at_heads_of_64_under_masks_of_edges_alone() -> None:
    def remainders(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((q - kv) % 7 != 3)

    def turns(D: int, mask: Any) -> list[bool]:
        with device_is("sm_90"):
            return [form.turns for form in in_order(call_of(D, mask, length=8 * LENGTH))]

    assert turns(64, causal) == [True, False, False, False]
    assert turns(64, remainders) == [False, False, False]
    assert not any(turns(64, None) + turns(128, causal))
