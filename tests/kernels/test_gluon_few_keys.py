"""Which backwards get the forms for masks whose queries see few keys, and smaller blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attnloom import create_block_mask
from attnloom.backends.gluon import backward_ahead, few_keys, launch_backward, ready_backward
from attnloom.backends.gluon.configs_backward import KEYS, LONG_STEP, STEP, Form
from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import refined as refined_blocks
from attnloom.backends.triton.operands import Operands
from attnloom.ir.node import DType
from attnloom.masking.refine import refine
from attnloom.plan.problem import KernelOptions
from attnloom.trace.tracer import trace_mask, trace_score
from tests.kernels.cross_compile import device_is

CPU = torch.device("cpu")


def packed(length: int, count: int = 12) -> Callable[..., Any]:
    ids = torch.arange(length) * count // length
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 128)


def window_of_1024(b, h, q, kv):
    return (q >= kv) & (q - kv < 1024)


def call_of(
    mask: Any,
    length: int = 2048,
    D: int = 128,
    Dv: int = 128,
    heads: int = 16,
    heads_kv: int = 16,
    block: Any = 128,
) -> AttentionCall:
    """16 batch entries."""
    made = create_block_mask(mask, None, None, length, length, "cpu", BLOCK_SIZE=block)
    query, key, value = (
        torch.empty(16, h, length, n, dtype=torch.bfloat16, device="meta")
        for h, n in ((heads, D), (heads_kv, D), (heads_kv, Dv))
    )
    traced = trace_mask(mask, CPU)
    return AttentionCall(query, key, value, None, traced, made.lists(), 0.125, KernelOptions())


def form_of(call: AttentionCall) -> Form:
    with device_is("sm_90"):
        return ready_backward._form_of(call)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """Calls that were given smaller blocks, without a device that refined.py asks for."""
    found: list[AttentionCall] = []

    def refined(call: AttentionCall, sides: tuple[int, int], worth: float) -> AttentionCall:
        if refined_blocks.may_change(call):
            return call
        found.append(call)
        assert call.blocks is not None and call.mask is not None
        return replace(call, blocks=refine(call.mask, call.blocks, sides))

    monkeypatch.setattr(few_keys, "refined", refined)
    return found


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (96, 128), (64, 72)])
@pytest.mark.parametrize(("length", "swept"), [(1024, True), (2048, True), (4096, True),
                                               (8192, False)])  # fmt: skip
def test_documents_have_the_forms_that_were_timed(
    asked: list[Any], length: int, swept: bool, D: int, Dv: int
) -> None:
    call = call_of(packed(length), length, D, Dv)
    smaller = few_keys.finer(call)
    assert asked == [call]
    assert smaller.blocks is not None
    assert (smaller.blocks.q_block, smaller.blocks.kv_block) == (STEP, KEYS)
    assert few_keys.finer(smaller) is smaller
    for same in (call, smaller):
        form = form_of(same)
        assert form.sweeps == form.mask_first == swept
        assert form.rows_apart and form.leaves_late and form.persistent


def test_heads_that_leave_processors_idle_are_not_swept() -> None:
    form = form_of(call_of(packed(2048), heads=9, heads_kv=9))
    assert form.leaves_late and not form.sweeps


@pytest.mark.parametrize("length", [200, 1000, 2048, 3000])
def test_what_is_swept_is_so_in_smaller_blocks(length: int) -> None:
    """Else gradients that were promised to repeat would be summed in no order."""
    for count in range(1, 40, 3):
        call = call_of(packed(length, count), length)
        assert call.blocks is not None and call.mask is not None
        finer = refine(call.mask, call.blocks, (STEP, KEYS))
        given = call.blocks.entries.numel() * call.blocks.q_block
        if finer.entries.numel() * STEP <= few_keys._WORTH * given:
            swept = form_of(call).sweeps, form_of(replace(call, blocks=finer)).sweeps
            assert swept[1] or not swept[0]


def causal(b, h, q, kv):
    return q >= kv


def with_score() -> AttentionCall:
    score = trace_score(lambda s, b, h, q, kv: s + q, DType.F32, CPU)
    return replace(call_of(packed(2048)), score=score)


OTHERS = {
    "many keys": lambda: call_of(packed(2048, 1)),
    "position alone": lambda: call_of(causal, 512),
    "window": lambda: call_of(window),
    "heads in groups": lambda: call_of(packed(2048), heads_kv=4),
    "narrow": lambda: call_of(packed(2048), D=64, Dv=64),
    "large blocks": lambda: call_of(packed(2048), block=(128, 256)),
    "score_mod": with_score,
    "no lists": lambda: replace(call_of(packed(2048)), blocks=None),
    "no mask": lambda: replace(call_of(packed(2048)), mask=None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_not_timed_keeps_its_blocks(asked: list[Any], name: str) -> None:
    call = OTHERS[name]()
    assert few_keys.finer(call) is call
    assert not asked and not few_keys.sees_few(call)


@pytest.mark.parametrize(
    ("mask", "length", "many"),
    [(causal, 8192, True), (causal, 4096, True), (causal, 2048, False), (window, 8192, False)],
)
def test_long_rows_have_the_form_that_was_timed(mask: Any, length: int, many: bool) -> None:
    call = call_of(mask, length)
    assert few_keys.sees_many(call) == many
    assert form_of(call).by_warp == many


def by_head(b, h, q, kv):
    return q >= kv + h


LONG = {
    "causal": (lambda: call_of(causal, 4352, 64, 64), True),
    "ragged, narrower, heads in groups": (lambda: call_of(causal, 4300, 48, 40, heads_kv=4), True),
    "blocks of 256": (lambda: call_of(causal, 4352, 64, 64, block=256), True),
    "blocks of 64": (lambda: call_of(causal, 4352, 64, 64, block=(64, 128)), False),
    "short": (lambda: call_of(causal, 2048, 64, 64), False),
    "window": (lambda: call_of(window, 4352, 64, 64), False),
    "looked up": (lambda: call_of(packed(4352, 1), 4352, 64, 64), False),
    "by head": (lambda: call_of(by_head, 4352, 64, 64), False),
    "wide": (lambda: call_of(causal, 4352, 64, 72), False),
    "score_mod": (lambda: replace(call_of(causal, 4352, 64, 64), score=with_score().score), False),
    "negative scale": (lambda: replace(call_of(causal, 4352, 64, 64), scale=-1.0), False),
    "no lists": (lambda: replace(call_of(causal, 4352, 64, 64), blocks=None), False),
    "no mask": (lambda: replace(call_of(causal, 4352, 64, 64), mask=None, blocks=None), False),
}


@pytest.mark.parametrize("name", LONG)
def test_long_rows_of_narrow_heads_have_long_steps(name: str) -> None:
    call, long = LONG[name]
    assert (form_of(call()).step == LONG_STEP) == long


@pytest.mark.parametrize(
    ("mask", "length", "D", "some"),
    [
        (window_of_1024, 4352, 128, True),
        (window_of_1024, 4352, 120, True),
        (window, 4352, 128, False),
        (causal, 2048, 128, True),
        (causal, 4352, 128, False),
        (packed(4352, 1), 4352, 128, False),
        (window_of_1024, 4352, 112, False),
    ],
)
def test_dv_starts_early_in_windows(mask: Any, length: int, D: int, some: bool) -> None:
    form = form_of(call_of(mask, length, D, D))
    assert form.dv_early == some
    assert not form.dv_early or (form.fold and form.persistent and form.named == 3)


def test_programs_that_draw_were_seen_faster_without_smaller_blocks_too() -> None:
    """Also where products start from 0, which nothing but a score_mod had under a mask."""
    for D, length in ((64, 4352), (96, 2048)):
        call = call_of(causal, length, D, D)
        with (
            device_is("sm_90"),
            mock.patch.object(ready_backward, "refined", lambda call: replace(call)),
        ):
            assert not form_of(call).fold
            assert ready_backward.portable(call) is None


def test_windows_of_other_widths_took_the_form_that_came_first() -> None:
    """A width is a number, which the digest of a mask does not have."""

    def key_of(width: int) -> Any:
        call = call_of(lambda b, h, q, kv: (q >= kv) & (q - kv < width), 8192)
        lse = torch.empty(call.query.shape[:3], device="meta")
        with device_is("sm_90"):
            return ready_backward.key_of(Operands.expected(call, call.query, lse))

    assert key_of(8192) == key_of(8191) != key_of(1024)


def test_masks_that_look_up_and_none_at_all_are_not_those_of_long_rows() -> None:
    assert not few_keys.sees_many(call_of(packed(8192, 1)))
    assert not few_keys.sees_many(replace(call_of(causal), blocks=None))


def test_ids_that_may_change_unseen_keep_blocks(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a graph is replayed, and where writes are not counted."""
    with torch.inference_mode():
        ids = torch.arange(2048) // 170
    call = call_of(lambda b, h, q, kv: ids[q] == ids[kv])
    assert few_keys.sees_few(call) and few_keys.finer(call) is call
    monkeypatch.setattr(refined_blocks, "is_capturing", lambda tensor: True)
    call = call_of(packed(2048))
    assert few_keys.finer(call) is call
    assert not asked


def test_kernels_are_compiled_ahead_for_the_blocks_that_are_launched(asked: list[Any]) -> None:
    expected = mock.Mock(side_effect=StopIteration)
    call = call_of(packed(2048))
    out = torch.empty(16, 16, 2048, 128, dtype=torch.bfloat16, device="meta")
    with (
        device_is("sm_90"),
        mock.patch.object(backward_ahead.Operands, "expected", expected),
        mock.patch.object(launch_backward.Operands, "of", expected),
    ):
        for start in (backward_ahead.start, lambda *a: launch_backward.backward(*a, out, None)):
            with pytest.raises(StopIteration):
                start(call, out, out[..., 0])
    blocks = [given.args[0].blocks for given in expected.call_args_list]
    assert [b.q_block for b in blocks] == [STEP, STEP]


def test_a_launch_that_is_kept_is_for_what_the_ids_held(asked: list[Any]) -> None:
    """Blocks were left out by ids that may be written to: the next launch must look again."""
    call = call_of(packed(2048))
    lines, ready = mock.MagicMock(), mock.Mock(finish=None)
    kept = mock.Mock()
    kept.only_for.return_value = "for these ids alone"
    found = mock.Mock(side_effect=lambda taken, *_: (mock.Mock(call=taken), ()))
    with (
        device_is("sm_90"),
        mock.patch.object(launch_backward, "operands_of_aliases", found),
        mock.patch.object(launch_backward, "buffers", lambda *_: (lines, lines)),
        mock.patch.object(launch_backward, "counter_of", mock.Mock()),
        mock.patch.object(launch_backward, "_main_arguments", mock.Mock()),
        mock.patch.object(launch_backward, "prepare_arguments", mock.Mock()),
        mock.patch.object(ready_backward, "key_of", lambda operands: "key"),
        mock.patch.object(ready_backward, "_ready", {"key": ready}),
        mock.patch.object(launch_backward.BackwardAgain, "of", lambda *_: kept),
    ):
        dout = torch.empty(16, 16, 2048, 128, dtype=torch.bfloat16, device="meta")
        with mock.patch.object(ready_backward, "with_descriptor", lambda dout: dout):
            again = launch_backward.backward_again(call, dout, dout[..., 0], dout, None)
    assert again == "for these ids alone"
    kept.only_for.assert_called_once_with(call)
