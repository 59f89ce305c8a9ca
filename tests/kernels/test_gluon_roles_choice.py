"""Which backwards of heads of 129 to 192 have dq, dk and dv in one kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom.backends.registry import AttentionCall
from attnloom.trace.tracer import trace_mask
from tests.kernels.cross_compile import device_is
from tests.kernels.test_gluon_backward_choice import CPU, make_call, softcap, takes_wide


def takes_roles(call: AttentionCall) -> bool:
    from attnloom.backends.gluon import launch_roles

    return takes_wide(call) and launch_roles.takes(call)


def by_head(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx + h


def with_mask(call: AttentionCall, mask_mod: Any) -> AttentionCall:
    return replace(call, mask=trace_mask(mask_mod, CPU))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"D": 136, "Dv": 64},
        {"Hkv": 4},
        {"block": (64, 128)},
        {"block": 512},
        {"backend": "gluon"},
    ],
    ids=str,
)
def test_wide_heads_without_a_score_mod_have_one_kernel(given: Any) -> None:
    call = make_call(**{"D": 192, **given})
    assert takes_roles(call)
    assert takes_roles(replace(call, mask=None, blocks=None))
    half = {name: getattr(call, name).half() for name in ("query", "key", "value")}
    assert takes_roles(replace(call, **half))


def test_a_mask_by_head_is_for_heads_that_share_no_keys() -> None:
    assert takes_roles(with_mask(make_call(192), by_head))
    for backend in ("auto", "gluon"):
        shared = with_mask(make_call(192, Hkv=4, backend=backend), by_head)
        assert not takes_roles(shared)
    assert takes_wide(shared)


@pytest.mark.parametrize(
    "given",
    [{"score_mod": softcap}, {"deterministic": True}, {"block": 64}, {"D": 128}, {"Dv": 200}],
    ids=lambda given: next(iter(given)),
)
def test_other_wide_heads_keep_their_kernels(given: Any) -> None:
    assert not takes_roles(make_call(**{"D": 192, **given}))


def test_lists_too_long_to_be_merged_are_left() -> None:
    from attnloom.backends.gluon import merged_lists

    call = make_call(192)
    assert call.blocks is not None
    entries = call.blocks.entries.numel()
    with mock.patch.object(merged_lists, "LIMIT", entries * 4):
        assert takes_roles(call)
    with mock.patch.object(merged_lists, "LIMIT", entries * 4 - 1):
        assert not takes_roles(call) and takes_wide(call)


@pytest.mark.parametrize("spills", [False, True])
def test_one_kernel_that_spills_gives_way_to_the_other(spills: bool) -> None:
    """In the first call, in later ones and in those that start anew, each asked once."""
    from attnloom.backends.gluon import launch_backward, launch_roles, launch_wide

    ready = mock.Mock()
    ready.main.spills, ready.scales = launch_roles.FEW_SPILLS + spills, (1.0, 1.0, 1.0)
    out = torch.empty(2, 8, 2048, 192, dtype=torch.bfloat16)
    rest = out, torch.empty(2, 8, 2048), torch.empty_like(out), None
    call = make_call(192)
    with (
        device_is("sm_90"),
        mock.patch.object(launch_roles, "_ready", {}),
        mock.patch.object(launch_roles, "_prepare", mock.Mock(return_value=ready)) as prepare,
        mock.patch.object(launch_roles, "_run", mock.Mock(return_value="at once")) as run,
        mock.patch.object(launch_roles, "_main_arguments", lambda *_: ()),
        mock.patch.object(launch_roles, "buffers", lambda *_: (out, out)),
        mock.patch.object(launch_roles, "started_again", lambda *_: b"again"),
        mock.patch.object(launch_wide, "backward", lambda _: "without dv"),
        mock.patch.object(launch_wide, "again", lambda *_: "without dv again"),
    ):
        wanted = "without dv" if spills else "at once"
        assert [launch_backward.backward(call, *rest) for _ in range(2)] == [wanted] * 2
        assert (prepare.call_count, run.call_count) == (1, 1 if spills else 2)
        wanted = "without dv again" if spills else b"again"
        assert launch_backward.backward_again(call, *rest) == wanted


@pytest.mark.parametrize(
    ("length", "heads"), [(512, 4), (8192, 4), (16384, 2), (32768, 1), (65536, 1)]
)
def test_heads_of_long_rows_are_taken_one_after_the_other(length: int, heads: int) -> None:
    from attnloom.backends.gluon.launch_roles import heads_together

    assert heads_together(torch.empty(1, 1, length, 1, device="meta")) == heads
