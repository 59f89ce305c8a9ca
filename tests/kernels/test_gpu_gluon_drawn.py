"""Programs of the Hopper backward that draw their tiles, against the oracle; `pytest -m gpu`. Each
test is a process that can be given up: a barrier may never come."""

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
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=700, D=64, Dv=64)
FEW_PROGRAMS = 5  # for 24 tiles of keys

pytestmark = ON_HOPPER


@contextlib.contextmanager
def drawn(programs: int = FEW_PROGRAMS, **changed: bool) -> Iterator[None]:
    """Inside, so many programs of a backward draw all tiles. changed: of their form."""
    from attnloom.backends.gluon import ready_backward

    form_of = ready_backward.form_of

    def persistent(operands):
        return replace(form_of(operands), persistent=True, narrow=True, **changed)

    with (
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(ready_backward, "form_of", persistent),
        mock.patch.object(ready_backward, "programs_of", lambda form, key: programs),
    ):
        yield


def check(case: Case, programs: int = FEW_PROGRAMS, **changed: bool) -> None:
    from tests.kernels.gluon_backward import check_gradients

    with drawn(programs, **changed):
        check_gradients(replace(case, block_size=128))


def check_mod(mod: str, head_dim: int, fp16: bool) -> None:
    sizes = replace(SIZES, D=head_dim, Dv=head_dim)
    check(Case(mod, sizes, FP16 if fp16 else BF16))


_MODS = (
    "plain",
    "causal",
    "softcap",
    "alibi",
    "document",
    "document_unsorted_per_batch",
    "window_with_sinks",
    "every_second_row",
    "nothing",
    "dilated_by_head",
    "causal_head_slope",
    "row_and_column",
    "pair_bias",
)


_TRIMMED = ("plain", "causal", "document")
# what is kept of captured rows does not fit beside two tiles of keys of 128 columns (by 260 bytes)
_TOO_LARGE = ("row_and_column", 128)


@pytest.mark.parametrize(
    ("mod", "head_dim"),
    [(mod, dim) for mod in _MODS for dim in (64, 128) if (mod, dim) != _TOO_LARGE]
    + [(mod, 96) for mod in _TRIMMED],
)
def test_mods(mod: str, head_dim: int) -> None:
    fp16 = _MODS.index(mod) % 2 == 1
    apart(check_mod, mod, head_dim, fp16)


def check_lengths(head_dim: int) -> None:
    """One program has all tiles, or each of more than there are tiles none or one."""
    for programs in (1, 64):
        for q_len, kv_len in ((1, 1), (1, 200), (63, 1), (129, 257), (17, 1000), (1000, 17)):
            sizes = replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len, D=head_dim, Dv=head_dim)
            check(Case("causal", sizes, BF16), programs)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_lengths(head_dim: int) -> None:
    apart(check_lengths, head_dim)


def check_repeats(head_dim: int) -> None:
    """dk and dv are bitwise the same each time, on two streams too."""
    from tests.kernels.gluon_backward import repeated

    with drawn(132):
        first, *others = repeated(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, head_dim)
    for results in others:
        assert torch.equal(results[1], first[1])
        assert torch.equal(results[2], first[2])
        torch.testing.assert_close(results[0], first[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_repeats(head_dim: int) -> None:
    apart(check_repeats, head_dim)
