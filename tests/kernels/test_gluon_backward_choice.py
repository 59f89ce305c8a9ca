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
BY_KEY = torch.rand(2048, requires_grad=True)
BY_QUERY = torch.rand(2048, requires_grad=True)
BY_DISTANCE = torch.rand(4096, requires_grad=True)
FULL = torch.rand(2, 8, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
ROWS = torch.rand(8, 4, requires_grad=True)


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
@pytest.mark.parametrize("D", [64, 96, 128])
def test_what_was_measured_runs_in_gluon(score_mod: Any, D: int) -> None:
    assert why(make_call(D, score_mod=score_mod)) is None


@pytest.mark.parametrize(
    ("score_mod", "is_slower"),
    [
        (learned, False),
        (lambda s, b, h, q, kv: s + BY_KEY[kv], False),
        (lambda s, b, h, q, kv: s + FULL[b, h, q, kv], False),
        (lambda s, b, h, q, kv: s + FULL[b, h, q, kv] * BY_QUERY[q], True),
        (lambda s, b, h, q, kv: s * BY_QUERY[q], True),
        (lambda s, b, h, q, kv: s + BY_DISTANCE[q - kv + 2047], True),
        (lambda s, b, h, q, kv: s * (ROWS[h] * ROWS[h]).sum(), True),
    ],
    ids=["head", "key", "score", "score and query", "query", "distance", "row"],
)
def test_gradients_that_are_summed_first_or_stored_leave_in_gluon(
    score_mod: Any, is_slower: bool
) -> None:
    found = why(make_call(score_mod=score_mod))
    assert found == (
        "gradients of captured tensors are added to in every step." if is_slower else None
    )


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
        ({"D": 88}, "padded to 128"),
        ({"D": 48}, "padded to 64"),
        ({"Hkv": 1, "KV_LEN": 1024}, "few keys"),
        ({"score_mod": lambda s, b, h, q, kv: s * BY_QUERY[q]}, "added to in every step"),
        ({"score_mod": alibi, "Hkv": 4, "KV_LEN": 4096}, "tell heads apart"),
    ],
)
def test_what_was_not_seen_faster_is_portable_under_auto(given: Any, reason: str) -> None:
    call = make_call(**given)
    found = why(call)
    assert found is not None and reason in found
    assert why(replace(call, options=KernelOptions(backend="gluon"))) is None
