"""Which problems the Gluon backward computes itself, and which the portable kernels do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.registry import AttentionCall
from attnloom.ir.node import DType
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import device_is

CPU = torch.device("cpu")
SLOPES = torch.rand(8)
LEARNED = torch.rand(8, requires_grad=True)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def learned(score, b, h, q_idx, kv_idx):
    return score + LEARNED[h] * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh(score / 30)


def make_call(
    D: int = 64,
    Hkv: int = 8,
    KV_LEN: int = 2048,
    score_mod: Any = None,
    block: int | tuple[int, int] = 128,
    **options: Any,
) -> AttentionCall:
    query = torch.empty(2, 8, 2048, D, dtype=torch.bfloat16)
    key = torch.empty(2, Hkv, KV_LEN, D, dtype=torch.bfloat16)
    blocks = attnloom.create_block_mask(causal, None, None, 2048, KV_LEN, "cpu", BLOCK_SIZE=block)
    score = None if score_mod is None else trace_score(score_mod, DType.F32, CPU)
    mask = trace_mask(causal, CPU)
    return AttentionCall(
        query, key, key, score, mask, blocks.lists(), 0.125, KernelOptions(**options)
    )


def why(call: AttentionCall) -> str | None:
    from attnloom.backends.gluon import ready_backward

    with device_is("sm_90"):
        return ready_backward.portable(call)


@pytest.mark.parametrize("score_mod", [None, softcap, alibi])
@pytest.mark.parametrize("D", [64, 128])
def test_what_was_measured_runs_in_gluon(score_mod: Any, D: int) -> None:
    assert why(make_call(D, score_mod=score_mod)) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"deterministic": True}, "bitwise repeatable"),
        ({"D": 192}, "wider than 128"),
        ({"D": 100}, "multiples of 16 bytes"),
        ({"block": 64}, "smaller than 64 x 128"),
        ({"block": (32, 128)}, "smaller than 64 x 128"),
    ],
)
def test_what_the_kernel_cannot_do_is_portable_whoever_asks(given: Any, reason: str) -> None:
    for backend in ("auto", "gluon"):
        found = why(make_call(**{"backend": backend, **given}))
        assert found is not None and reason in found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"D": 96}, "padded to 128"),
        ({"Hkv": 1, "KV_LEN": 1024}, "few keys"),
        ({"score_mod": learned}, "captured tensors get gradients"),
        ({"score_mod": alibi, "Hkv": 4, "KV_LEN": 4096}, "tell heads apart"),
    ],
)
def test_what_was_not_seen_faster_is_portable_under_auto(given: Any, reason: str) -> None:
    call = make_call(**given)
    found = why(call)
    assert found is not None and reason in found
    assert why(replace(call, options=KernelOptions(backend="gluon"))) is None
