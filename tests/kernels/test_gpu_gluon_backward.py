"""The Gluon backward on a Hopper GPU against the oracle; `pytest -m gpu`.

Every case compiles a kernel, so that cases are few and join what they can: ragged lengths, heads in
groups and strided inputs are in most of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.harness.mods import MODS
from tests.kernels.apart import apart

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=290, D=64, Dv=64)
WIDE = replace(SIZES, D=128, Dv=128)
ONE_HEAD_A_KEY = replace(SIZES, Hkv=4)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU"),
]


def check(case: Case, portable: bool = False, **options) -> None:
    from tests.kernels.gluon_backward import check_gradients

    check_gradients(replace(case, block_size=128), portable, **options)


@pytest.mark.parametrize(
    ("mod", "sizes", "dtype"),
    [
        ("plain", WIDE, FP16),
        ("causal", WIDE, BF16),
        ("causal", SIZES, FP16),
        ("softcap", WIDE, FP16),
        ("softcap", SIZES, BF16),
        ("alibi", replace(ONE_HEAD_A_KEY, D=128, Dv=128), BF16),
        ("document", WIDE, BF16),
        ("window_with_sinks", SIZES, BF16),
        ("every_second_row", WIDE, BF16),
        ("nothing", SIZES, BF16),
        ("singular_where_masked", ONE_HEAD_A_KEY, BF16),
    ],
)
def test_mods(mod: str, sizes: Sizes, dtype: torch.dtype) -> None:
    check(Case(mod, sizes, dtype, magnitude=3.0 if mod == "plain" else 1.0))


@pytest.mark.parametrize(("D", "Dv"), [(40, 128), (128, 56), (96, 96), (112, 72)])
def test_head_dims(D: int, Dv: int) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, scale=-0.3))


@pytest.mark.parametrize("D", [72, 80, 96, 112])
def test_heads_past_which_columns_are_left_out(D: int) -> None:
    apart(check_trimmed, D)


def check_trimmed(D: int) -> None:
    """Of programs that draw tiles and of one a tile, to which no tile is masked."""
    for mod, kv_len in (("causal", 290), ("plain", 256), ("document", 290)):
        sizes = replace(SIZES, KV_LEN=kv_len, D=D, Dv=D)
        check(Case(mod, sizes, FP16 if mod == "plain" else BF16))
    check(Case("causal", replace(ONE_HEAD_A_KEY, D=D, Dv=48), BF16))


@pytest.mark.parametrize("D", [88, 96])
def test_heads_of_96_columns(D: int) -> None:
    """dk, dv and dq in products of as many."""
    apart(check_native, D)
    apart(check_native_masks, D)


def check_native(D: int) -> None:
    """With keys that all programs have whole and with ragged ones, a head a key, strided."""
    sizes = replace(SIZES, D=D, Dv=D)
    for mod, kv_len in (("plain", 256), ("plain", 290), ("every_second_row", 290)):
        check(Case(mod, replace(sizes, KV_LEN=kv_len, Dv=96), FP16))
    check(Case("plain", replace(sizes, Q_LEN=65, KV_LEN=128, Hkv=4), BF16, layout="transposed"))


def check_native_masks(D: int) -> None:
    """Keys of one batch entry, masks that look up or tell heads apart, scores that overflow."""
    sizes = replace(SIZES, D=D, Dv=D)
    check(Case("causal", replace(sizes, B=3, Q_LEN=300), BF16, kv_batch=1, layout="transposed"))
    check(Case("dilated_by_head", sizes, BF16))
    check(Case("document_unsorted_per_batch", replace(sizes, Hkv=4), BF16))
    check(Case("window_with_sinks", sizes, BF16, magnitude=30.0))


def test_lengths() -> None:
    for q_len, kv_len in ((1, 1), (1, 63), (63, 1), (129, 257), (17, 1000), (1000, 17)):
        check(Case("causal", replace(WIDE, Q_LEN=q_len, KV_LEN=kv_len), BF16))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["64", "128"])
@pytest.mark.parametrize("mod", ["plain", "every_second_row", "window_with_sinks"])
def test_scores_that_overflow_where_keys_end(mod: str, sizes: Sizes) -> None:
    """Keys past KV_LEN are zeros: against an lse far below zero, exp(0 - lse) is infinite."""
    check(Case(mod, sizes, BF16, magnitude=30.0))


def test_heads_that_are_not_neighbours_and_keys_of_one_batch_entry() -> None:
    check(Case("causal", SIZES, BF16, layout="transposed"))
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["64", "128"])
@pytest.mark.parametrize("block_size", [(64, 128), (512, 256)], ids=str)
def test_block_sizes(block_size: tuple[int, int], sizes: Sizes) -> None:
    from tests.kernels.gluon_backward import check_gradients

    sizes = replace(sizes, Q_LEN=700, KV_LEN=600)
    check_gradients(Case("sliding_window", sizes, BF16, block_size=block_size))


def test_wider_heads_and_small_blocks_are_left_to_the_portable_kernels() -> None:
    from tests.kernels.gluon_backward import check_gradients

    check(Case("causal", replace(SIZES, D=200), BF16), portable=True)
    check_gradients(Case("causal", SIZES, BF16, block_size=32), portable=True)


_GROUPS = [
    ("causal_head_slope", SIZES),  # a gradient for each head, in both shapes of the kernel
    ("alibi", WIDE),
    ("dilated_by_head", WIDE),  # a list of blocks for each head
    ("document_unsorted_per_batch", SIZES),
    ("relative_bias", SIZES),  # a gradient for each score
    ("row_and_column", SIZES),  # for each query, once doubled, and each key
    ("rbf_bias", SIZES),  # for each head, along a captured row
    ("low_rank_dot", SIZES),  # for each query and each key, along a captured row
    ("pair_bias", SIZES),  # a store for each score
]


@pytest.mark.parametrize(("mod", "sizes"), _GROUPS)
def test_mods_that_tell_heads_apart(mod: str, sizes: Sizes) -> None:
    """Units of a key head were once counted from 0 each, so that barriers were waited for that
    never came: in a process that can be given up."""
    apart(check_apart, mod, sizes.D)


def check_apart(mod: str, head_dim: int) -> None:
    sizes = SIZES if head_dim == SIZES.D else WIDE
    kv_batch = 1 if mod == "relative_bias" else None
    check(Case(mod, sizes, BF16, kv_batch=kv_batch))


CAPTURED = sorted(name for name, row in MODS.items() if row.learnable)


@pytest.mark.parametrize("mod", CAPTURED)
def test_captured_gradients(mod: str) -> None:
    """Also those that `auto` leaves to the portable kernels (ready_backward.slower)."""
    apart(check_captured, mod)


def check_captured(mod: str) -> None:
    """Heads in groups, by head and with what is shared; a head a key, in the wide kernel; keys that
    all batch entries share."""
    check(Case(mod, SIZES, BF16))
    check(Case(mod, replace(ONE_HEAD_A_KEY, D=128, Dv=128), FP16))
    check(Case(mod, SIZES, BF16, kv_batch=1))
