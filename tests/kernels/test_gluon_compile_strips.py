"""Steps of 96 keys of the Gluon forward, compiled for Hopper without one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.gluon_triton import needs_gluon

needs_gluon()

from attnloom.backends.gluon import configs_forward, launch_forward  # noqa: E402
from attnloom.backends.registry import AttentionCall  # noqa: E402
from attnloom.backends.triton.hasty import hastily  # noqa: E402
from tests.kernels.cross_compile import TARGETS  # noqa: E402
from tests.kernels.cross_compile_gluon import CompiledGluon  # noqa: E402
from tests.kernels.test_gluon_compile_forward import (  # noqa: E402
    BF16,
    FP16,
    LENGTH,
    call_of,
    causal,
    compiled,
    near,
    sinks,
)

pytestmark = pytest.mark.usefixtures("rows_are_long")


def prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) | (kv < 77)


def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q - kv) % 3 == 0)


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 64 * (h + 1))


def fixed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q // 64 == kv // 64) | (kv % 64 >= 48))


def check(call: AttentionCall) -> CompiledGluon:
    found = compiled(call)
    assert found.serialised == ()
    assert found.spills == 0
    assert found.shared <= TARGETS["sm_90"][1].shared_bytes
    assert "m64n96k16" in found.text
    return found


def narrower(call: AttentionCall, D: int, Dv: int, kv_len: int) -> AttentionCall:
    """With fewer columns; and fewer keys, without lists."""
    q, k, v = call.query[..., :D], call.key[..., :kv_len, :D], call.value[..., :kv_len, :Dv]
    q, k, v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return replace(call, query=q, key=k, value=v, scale=D**-0.5)


QUICK = [(causal, BF16), (None, BF16)]
REST = [(near, FP16), (sinks, BF16), (prefix, BF16), (dilated, BF16), (by_head, FP16)]
REST += [(fixed, BF16), (None, FP16)]


@pytest.mark.parametrize(
    ("mask", "dtype"), [*QUICK, *[pytest.param(*case, marks=pytest.mark.long) for case in REST]]
)
def test_nothing_is_spilled_and_no_product_waited_for_at_once(
    mask: Any, dtype: torch.dtype
) -> None:
    found = check(call_of(192, None, mask, dtype))
    # of two consumers: q . k^T of the first step and of the others; p . v of 96 keys, and the last
    assert found.text.count("m64n96k16") == 2 * 2 * 12
    assert found.text.count("m64n192k16") == 2 * 2 * 6
    assert re.search(r"\.extern \.shared [^;]*\bglobal_smem\[\];", found.text)


@pytest.mark.long
@pytest.mark.parametrize("mask", [None, causal])
def test_other_calls(mask: Any) -> None:
    """Fewer columns, of which q . k^T leaves out 16; keys that end in a step, or with one; scores
    that are multiplied before the exponentials; masks without lists."""
    call = call_of(192, None, mask)
    found = check(narrower(replace(call, blocks=None), 168, 176, LENGTH - 12))
    assert found.text.count("m64n96k16") == 2 * 2 * 11
    check(narrower(replace(call, blocks=None), 192, 192, 480))
    check(replace(call, scale=-0.1))


@pytest.mark.long
@pytest.mark.parametrize("mask", [None, causal])
def test_first_calls(mask: Any) -> None:
    in_order = launch_forward._in_order

    def quick(call: AttentionCall, known: bool) -> tuple[Any, ...]:
        return (configs_forward.quick(in_order(call, known)[0]),)

    with mock.patch.object(launch_forward, "_in_order", quick), hastily():
        found = compiled(call_of(192, None, mask))
    assert found.serialised == ()
    assert found.spills <= 16
    assert found.text.count("m64n96k16") == 12
