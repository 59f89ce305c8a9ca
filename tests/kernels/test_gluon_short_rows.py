"""Which masks have smaller tiles in the Gluon forward (short_rows.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnloom import create_block_mask
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import DType
from attnloom.masking.refine import refine
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import device_is

pytest.importorskip("triton.experimental.gluon")
from attnloom.backends.gluon import launch_forward, short_rows
from attnloom.backends.gluon.configs_forward import Form, forms_of_short_rows
from attnloom.backends.triton import refined as refined_blocks

CPU = torch.device("cpu")
LENGTH = 2048
IDS = torch.arange(LENGTH, dtype=torch.int32) // 170
BY_BATCH = torch.stack((IDS, IDS.flip(0)))
SLOPES = torch.ones(4)
START = torch.tensor([100, 1900])


def documents(b, h, q, kv):
    return (q >= kv) & (IDS[q] == IDS[kv])


def documents_by_batch(b, h, q, kv):
    return BY_BATCH[b, q] == BY_BATCH[b, kv]


def documents_by_head(b, h, q, kv):
    return (IDS[q] == IDS[kv]) & ((q >= kv) | (h % 2 == 0))


def near(b, h, q, kv):
    return (q >= kv) & (q - kv < 200)


def causal(b, h, q, kv):
    return q >= kv


def near_both_ways(b, h, q, kv):
    return (q - kv).abs() < 100


def less_near(b, h, q, kv):
    """Rows of five blocks."""
    return (q >= kv) & (q - kv < 512)


def late(b, h, q, kv):
    return near(b, h, q, kv) & (q >= START[b])


SIZES = {documents_by_batch: (2, None), documents_by_head: (None, 4), late: (2, None)}


def call_of(
    mask: Any, block: int = 128, D: int = 128, Dv: int = 128, score: Any = None
) -> AttentionCall:
    batch, heads = SIZES.get(mask, (None, None))
    made = create_block_mask(mask, batch, heads, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block)
    query, key, value = (torch.empty(2, 4, LENGTH, n, dtype=torch.float16) for n in (D, D, Dv))
    bound = None if score is None else trace_score(score, DType.F32, CPU)
    return AttentionCall(
        query, key, value, bound, trace_mask(mask, CPU), made.lists(), D**-0.5,
        KernelOptions(),
    )  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """Calls whose blocks were made smaller, without a device that refined.py asks for."""
    asked: list[AttentionCall] = []

    def refined(call: AttentionCall) -> AttentionCall:
        if refined_blocks.may_change(call):
            return call
        asked.append(call)
        assert call.blocks is not None and call.mask is not None
        return replace(call, blocks=refine(call.mask, call.blocks, refined_blocks.SIDES))

    monkeypatch.setattr(short_rows, "refined", refined)
    return asked


def first_form(call: AttentionCall) -> Form:
    with device_is("sm_90"):
        return launch_forward._in_order(short_rows.finer(call), True)[0]


@pytest.mark.parametrize("mask", [documents, documents_by_batch, documents_by_head])
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (96, 128), (72, 64), (64, 64), (16, 40)])
def test_documents_get_tiles_of_64(counted: list[Any], mask: Any, D: int, Dv: int) -> None:
    form = first_form(call_of(mask, D=D, Dv=Dv))
    assert len(counted) == 1
    assert (form.tile_m, form.tile_n, form.programs) == (64, 64, 2)
    assert form == forms_of_short_rows(D, Dv)[0]


@pytest.mark.parametrize("mask", [near, near_both_ways])
def test_short_windows_get_tiles_of_64(counted: list[Any], mask: Any) -> None:
    assert first_form(call_of(mask)) == forms_of_short_rows(128, 128)[0]
    assert len(counted) == 1
    assert first_form(call_of(mask, D=64, Dv=64)).programs == 1
    assert first_form(call_of(mask, score=softcap)).programs == 1
    assert len(counted) == 1


@pytest.mark.parametrize("mask", [causal, less_near, late])
def test_other_masks_by_position_keep_theirs(counted: list[Any], mask: Any) -> None:
    form = first_form(call_of(mask))
    assert not counted
    assert (form.tile_m, form.tile_n, form.programs) == (128, 128, 1)


def softcap(score, b, h, q, kv):
    return 30 * torch.tanh(score / 30)


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("score", [softcap, alibi])
def test_documents_with_a_score_mod_get_tiles_of_64(counted: list[Any], score: Any, D: int) -> None:
    form = first_form(call_of(documents, D=D, Dv=D, score=score))
    assert form == forms_of_short_rows(D, D)[0]


def test_blocks_stay_where_smaller_ones_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """No form takes blocks of 64 then."""
    many = call_of(causal, block=64)
    monkeypatch.setattr(short_rows, "refined", lambda call: replace(call, blocks=many.blocks))
    assert first_form(call_of(documents)).programs == 1


Change = Callable[[pytest.MonkeyPatch], AttentionCall]


def long_rows(_: Any) -> AttentionCall:
    """Two documents: 4.5 of 128 tokens more than there may be."""
    ids = torch.arange(LENGTH) // 1800
    return call_of(lambda b, h, q, kv: ids[q] == ids[kv])


def with_distances(_: Any) -> AttentionCall:
    return call_of(documents, score=lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs())


def with_elements(_: Any) -> AttentionCall:
    return call_of(documents, score=lambda s, b, h, q, kv: s + IDS[q - kv])


def exact(_: Any) -> AttentionCall:
    options = KernelOptions(exact_math=True)
    return replace(call_of(documents, score=softcap), options=options)


def capturing(monkeypatch: pytest.MonkeyPatch) -> AttentionCall:
    """When the graph is replayed ids may have changed."""
    monkeypatch.setattr(refined_blocks, "is_capturing", lambda tensor: True)
    return call_of(documents)


def inference(_: Any) -> AttentionCall:
    """Nobody counts the writes to such ids."""
    with torch.inference_mode():
        ids = IDS.clone()
    return call_of(lambda b, h, q, kv: ids[q] == ids[kv])


def wide(_: Any) -> AttentionCall:
    return call_of(documents, D=192, Dv=192)


@pytest.mark.parametrize(
    "change", [long_rows, with_distances, with_elements, exact, capturing, inference, wide]
)
def test_other_documents_keep_theirs(
    counted: list[Any], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_form(change(monkeypatch)).programs == 1
    assert not counted


def test_masks_of_one_shape_shared_what_only_short_rows_have() -> None:
    """A refusal of long rows in blocks of 64 was remembered for short ones as well."""

    def key(ids: torch.Tensor) -> tuple[object, ...]:
        call = call_of(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), block=64)
        with device_is("sm_90"):
            return launch_forward._key(call, False)[1]

    assert key(IDS) == key(IDS.clone())
    assert key(IDS) != key(torch.zeros_like(IDS))


def test_blocks_of_64_with_few_of_them_a_row(counted: list[Any]) -> None:
    assert first_form(call_of(documents, block=64)).programs == 2
    assert first_form(call_of(near, block=64)).programs == 2
    assert not counted
    with device_is("sm_90"):
        for mask in (causal, less_near):
            assert launch_forward._forms(call_of(mask, block=64)) == ()
            assert "64 x 64 tokens" in str(launch_forward._refusal(call_of(mask, block=64)))


def test_the_backward_is_prepared_for_the_given_blocks(
    counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels would be compiled beside the forward than are launched after it."""
    chosen: list[tuple[AttentionCall, AttentionCall]] = []
    monkeypatch.setattr(launch_forward, "_ready", {})
    monkeypatch.setattr(launch_forward, "_not_here", lambda call: None)
    monkeypatch.setattr(
        launch_forward,
        "_choose",
        lambda call, tensors, fixed, given: chosen.append((call, given)) or "chosen",
    )
    call = call_of(documents)
    with device_is("sm_90"):
        assert launch_forward.forward(call, False) == "chosen"
    ((smaller, given),) = chosen
    assert smaller.blocks is not None and smaller.blocks.q_block == 64
    assert given is call
