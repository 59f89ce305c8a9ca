"""Steps of 128 queries in the Hopper backward, against the oracle; `pytest -m gpu`. Each test is a
process that can be given up: a barrier may never come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.apart import apart
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=700, KV_LEN=700, D=64, Dv=64)

pytestmark = ON_HOPPER


@contextlib.contextmanager
def long_steps(programs: int = 5) -> Iterator[None]:
    """Inside, so many programs have long steps, whatever they spill."""
    from attnloom.backends.gluon import few_keys, ready_backward

    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(few_keys, "_MANY_KEYS", 0),
        mock.patch.object(few_keys, "sweeps", lambda call: False),
        mock.patch.object(ready_backward, "followed", lambda form: None),
        mock.patch.object(ready_backward, "programs_of", lambda form, key: programs),
    ):
        yield
        found = [*ready_backward._ready.values()]
        assert found
        assert all(ready is not None and ready.main.config.TILE_M == 128 for ready in found)


def check(case: Case, programs: int = 5, block_size: int | tuple[int, int] = 128) -> None:
    from tests.kernels.gluon_backward import check_gradients

    with long_steps(programs):
        check_gradients(replace(case, block_size=block_size))


def check_mod(mod: str, fp16: bool) -> None:
    """Heads in groups, and a head a key."""
    check(Case(mod, SIZES, FP16 if fp16 else BF16))
    check(Case(mod, replace(SIZES, Hkv=4, Q_LEN=600), BF16 if fp16 else FP16))


@pytest.mark.parametrize("mod", ["causal", "sliding_window", "window_with_sinks",
                                 "every_second_row"])  # fmt: skip
def test_mods(mod: str) -> None:
    apart(check_mod, mod, mod == "causal")


def check_lengths() -> None:
    """One program has all tiles, or each of more than there are tiles none or one."""
    for programs in (1, 64):
        for q_len, kv_len in ((1, 1), (1, 200), (65, 1), (129, 257), (17, 1000), (1000, 17)):
            check(Case("causal", replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len), BF16), programs)


def test_lengths() -> None:
    apart(check_lengths)


def check_shapes() -> None:
    """Other head dimensions, blocks of several steps, of which some are past the end."""
    for D, Dv in ((40, 64), (64, 24)):
        check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16))
    check(Case("causal", replace(SIZES, Q_LEN=540), BF16), block_size=(512, 256))


def check_inputs() -> None:
    """Strided ones, keys of one batch entry, and scores that overflow where keys end."""
    check(Case("causal", SIZES, BF16, layout="transposed"))
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))
    check(Case("every_second_row", replace(SIZES, KV_LEN=650), BF16, magnitude=30.0))


def test_shapes_and_inputs() -> None:
    apart(check_shapes)
    apart(check_inputs)


def check_repeats() -> None:
    """dk and dv are bitwise the same each time, on two streams too."""
    from tests.kernels.gluon_backward import repeated

    with long_steps(132):
        first, *others = repeated(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 64)
    for results in others:
        assert torch.equal(results[1], first[1])
        assert torch.equal(results[2], first[2])
        torch.testing.assert_close(results[0], first[0], rtol=1e-2, atol=1e-2)


def test_repeats() -> None:
    apart(check_repeats)


def check_gives_way() -> None:
    """As if the long steps had spilled: gradients are those of the form that follows."""
    from attnloom.backends.gluon import configs_backward, few_keys, ready_backward
    from tests.kernels.gluon_backward import check_gradients

    spilled = {form: (-1, then) for form, (_, then) in configs_backward._INSTEAD.items()}
    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(few_keys, "_MANY_KEYS", 0),
        mock.patch.object(configs_backward, "_INSTEAD", spilled),
    ):
        check_gradients(Case("causal", SIZES, BF16, block_size=128))
        (ready,) = ready_backward._ready.values()
        assert ready is not None and ready.main.config.TILE_M == 64


def test_a_form_that_spills_gives_way() -> None:
    apart(check_gives_way)
