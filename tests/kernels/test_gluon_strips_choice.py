"""Which calls of the Gluon forward have steps of 96 keys (forward_strips.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from attnloom import BlockMask, create_block_mask
from attnloom.backends.gluon import launch_forward, merged_lists
from attnloom.backends.gluon.configs_forward import quick
from attnloom.backends.gluon.fields_forward import config_of
from tests.kernels.cross_compile import device_is
from tests.kernels.test_gluon_forward_choice import (
    LENGTH,
    call_of,
    capped,
    causal,
    documents,
    in_order,
)

pytestmark = pytest.mark.usefixtures("rows_are_long")


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 200)


@pytest.mark.parametrize("mask", [None, causal, window])
@pytest.mark.parametrize(
    ("D", "Dv", "wanted"),
    [(192, 192, True), (168, 176, True), (161, 192, True), (160, 160, False), (192, 160, False),
     (144, 192, False), (192, 128, False), (192, 200, False), (96, 96, False)],
)  # fmt: skip
def test_widths(D: int, Dv: int, wanted: bool, mask: Any) -> None:
    found = in_order(call_of(D, mask, Dv=Dv))
    assert [form.strips for form in found] == [wanted] + [False] * (len(found) - 1)
    if wanted:
        assert found[0].turns == (mask is None)


@pytest.mark.parametrize(("mask", "score"), [(documents, None), (causal, capped), (None, capped)])
def test_mods_that_nobody_timed_have_none(mask: Any, score: Any) -> None:
    assert not any(form.strips for form in in_order(call_of(192, mask, score)))


def test_a_mask_without_lists_has_them() -> None:
    found = in_order(replace(call_of(192, causal), blocks=None))
    assert found[0].strips and found[0].turns


@pytest.mark.parametrize(
    ("block", "wanted"),
    [(128, True), ((128, 64), True), ((256, 256), True), ((128, 512), True), ((64, 128), False)],
)
def test_blocks(block: Any, wanted: bool) -> None:
    made = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block)
    found = in_order(replace(call_of(192, causal), blocks=made.lists()))
    assert found[0].strips == wanted


def test_chosen_lists_have_none_and_kernels_of_their_own() -> None:
    """Their full blocks need not follow from the mask_mod, which a step asks in all of its keys."""
    call = call_of(192, causal)
    near = torch.ones(LENGTH // 128, LENGTH // 128, dtype=torch.bool).tril()
    made = BlockMask.from_block_bool(near, None, 128, causal, (LENGTH, LENGTH))
    own = replace(call, blocks=made.lists())
    assert own.blocks is not None and own.blocks.chosen
    assert not any(form.strips for form in in_order(own))
    with device_is("sm_90"):
        assert launch_forward._key(call, False) != launch_forward._key(own, False)


def test_long_lists_have_none() -> None:
    """Boxes are counted in 32 bits."""
    with mock.patch.object(merged_lists, "LIMIT", 3):
        assert not any(form.strips for form in in_order(call_of(192, causal)))


def test_a_first_call_has_them_one_product_after_the_other() -> None:
    for mask in (None, causal):
        found = quick(in_order(call_of(192, mask))[0])
        assert found is not None and found.strips and found.wide and found.hasty
        assert not (found.overlap or found.packed or found.turns or found.out_ring)
        assert found.out_in_q and (found.consumers, found.warps, found.tile_m) == (1, 8, 128)


@pytest.mark.parametrize(("length", "masked"), [(960, False), (1024, True)])
def test_the_mask_is_asked_for_where_a_step_may_be_filled_up(length: int, masked: bool) -> None:
    """A list has any number of boxes, so that its last step may have less than three."""
    for mask in (None, causal):
        call = call_of(192, mask, length=length)
        with device_is("sm_90"):
            config = config_of(call, in_order(call)[0], None, False)
        assert (masked or mask is not None) == config.MAY_MASK
        assert (4 if mask else 1, 32, 96) == (config.SUB, config.BOX, config.TILE_N)


def test_short_rows_have_steps_of_64_keys() -> None:
    """Under a mask; and no launch of others."""
    from attnloom.backends.gluon import few_steps

    found = []
    for length in (512, 1024, 2048):
        call = call_of(192, causal, length=length)
        short = few_steps.wants_short_steps(call)
        with mock.patch.object(launch_forward, "wants_short_steps", lambda _, short=short: short):
            forms = in_order(call)
            found.append((short, forms[0].tile_n, launch_forward._key(call, False)[1][4]))
        assert {form.tile_n for form in forms} >= {64, 96, 128}
    assert found == [(True, 64, True), (True, 64, True), (False, 96, False)]
    assert not few_steps.wants_short_steps(call_of(192, None, length=512))
    assert not few_steps.wants_short_steps(call_of(192, causal, capped, length=512))
    assert not few_steps.wants_short_steps(call_of(128, causal, length=512))
