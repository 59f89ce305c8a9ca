"""Which calls at D=64 and 96 have two consumers in place of three (gluon/few_steps.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnloom import BlockMask, create_block_mask
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import TARGETS, device_is
from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

# ruff: noqa: E402
from attnloom.backends.gluon import configs_forward, launch_forward
from attnloom.backends.gluon.few_steps import has_few_steps
from tests.kernels import test_gluon_compile_forward as compile_forward

CPU = torch.device("cpu")
IDS = torch.arange(8192, dtype=torch.int32) // 100


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 250)


def wide_window(b, h, q, kv):
    return (q >= kv) & (q - kv < 1024)


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


def call_of(mask: Any, length: int, block: int = 128, D: int = 64, Dv: int = 64) -> AttentionCall:
    query, key, value = (
        torch.empty(1, 2, length, n, dtype=torch.bfloat16, device="meta") for n in (D, D, Dv)
    )
    lists = bound = None
    if mask is not None:
        lists = create_block_mask(mask, None, None, length, length, CPU, BLOCK_SIZE=block).lists()
        bound = trace_mask(mask, CPU)
    return AttentionCall(query, key, value, None, bound, lists, D**-0.5, KernelOptions())


def consumers(call: AttentionCall) -> list[int]:
    """Of the forms to try, in order."""
    with device_is("sm_90"):
        return [form.consumers for form in launch_forward._in_order(call, True)]


def is_two_first(call: AttentionCall) -> bool:
    first, *others = consumers(call)
    return first == 2 and set(others) == {3}


def is_two_last(call: AttentionCall) -> bool:
    *others, last = consumers(call)
    return last == 2 and set(others) == {3}


FEW = [(causal, 300), (causal, 512), (causal, 1000), (causal, 1024), (window, 1024)]
FEW += [(window, 8192), (None, 128), (None, 512)]


@pytest.mark.parametrize(("mask", "length"), FEW)
def test_few_steps_get_two_consumers_first(mask: Any, length: int) -> None:
    assert is_two_first(call_of(mask, length))


# 192 queries without a mask are one tile of three consumers, and two tiles of two
MANY = [(causal, 2048), (causal, 8192), (wide_window, 8192), (None, 192), (None, 2048)]


@pytest.mark.parametrize(("mask", "length"), MANY)
def test_many_steps_keep_three(mask: Any, length: int) -> None:
    assert is_two_last(call_of(mask, length))


def test_the_causal_form_follows_from_the_length() -> None:
    """Once rows are long enough for three they stay so, where both have whole tiles."""
    found = [has_few_steps(call_of(causal, length)) for length in range(384, 4096, 384)]
    assert found == sorted(found, reverse=True)
    assert found[0]
    assert not found[5]


def with_score(call: AttentionCall) -> AttentionCall:
    score = trace_score(lambda s, b, h, q, kv: s + 0.5 * (q - kv), DType.F32, CPU)
    return replace(call, score=score)


OTHERS = {
    "score_mod": with_score(call_of(causal, 1024)),
    "looks up": call_of(documents, 1024),
    "blocks of 64": call_of(causal, 1024, block=64),
    "blocks of 256": call_of(causal, 1024, block=256),
    "no block": call_of(lambda b, h, q, kv: q < 0, 1024),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_timed_keeps_three(name: str) -> None:
    assert not has_few_steps(OTHERS[name])


@pytest.mark.parametrize("D", [72, 96])
def test_heads_of_65_to_96_have_three_without_a_mask_and_with_many_steps(D: int) -> None:
    assert consumers(call_of(None, 8192, D=D, Dv=96))[0] == 3
    assert consumers(call_of(None, 1024, D=D, Dv=96))[0] == 2
    assert 3 not in consumers(call_of(causal, 8192, D=D, Dv=96))


@pytest.mark.parametrize(("D", "Dv"), [(96, 96), (128, 128), (64, 128), (192, 192)])
def test_wider_heads_have_forms_of_their_own(D: int, Dv: int) -> None:
    assert not has_few_steps(call_of(causal, 1024, D=D, Dv=Dv))


def test_launches_with_few_and_with_many_steps_are_remembered_apart() -> None:
    """Same shapes and mask_mod, other blocks."""
    near = BlockMask.from_block_bool(
        torch.eye(16, dtype=torch.bool), None, 128, causal, (2048, 2048)
    )
    many = call_of(causal, 2048)
    few = replace(many, blocks=near.lists())
    assert is_two_first(few)
    assert is_two_last(many)
    with device_is("sm_90"):
        assert launch_forward._key(few, False) != launch_forward._key(many, False)


@pytest.mark.parametrize(
    "mask", [causal, pytest.param(None, marks=pytest.mark.long)], ids=["causal", "full"]
)
def test_two_consumers_compile(mask: Any) -> None:
    call = compile_forward.call_of(64, None, mask)
    with device_is("sm_90"):
        assert launch_forward._in_order(call, True)[0] == configs_forward.forms(64, 64, 128)[1]
    found = compile_forward.compiled(call)
    assert found.serialised == ()
    assert found.spills == 0
    assert found.shared <= TARGETS["sm_90"][1].shared_bytes
