"""The Triton backward against the oracle: every form of captured gradient, in both modes.

A step takes the interpreter as long whatever its size, and a case as long as it has steps: tests
that are not about small tiles draw halves, which have four times larger ones.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import attnloom
from attnloom.backends.triton.configs import Tile
from benchmarks.candidates import PortableBackward
from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.backward_modes import check_gradients, check_repeats

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SIZES = Sizes(B=1, Hq=2, Hkv=1, Q_LEN=20, KV_LEN=37, D=16, Dv=16)
# How a contribution leaves a tile (emit_grad.py): summed over the whole head, over a row, over a
# column; by distance; by score into a shared and into its own element; twice into one tensor.
FORMS = [
    "head_slope",
    "batch_head_gain",
    "temperature",
    "row_and_column",
    "relative_bias",
    "pair_bias",
    "full_bias",
    "captured_twice",
]


def half_slow(*columns) -> list:
    """All combinations, of which every second runs every time: each value with half of the rest."""
    return [
        pytest.param(*(x for x, _ in row), marks=[pytest.mark.slow] * (sum(n for _, n in row) % 2))
        for row in itertools.product(*(zip(c, range(len(c)), strict=True) for c in columns))
    ]


@pytest.mark.parametrize(("mod", "deterministic"), half_slow(FORMS, [False, True]))
def test_captured_gradients(mod: str, deterministic: bool) -> None:
    check_gradients(Case(mod, SIZES), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mod", ["rbf_bias", "low_rank_dot"])
def test_captured_gradients_of_reductions(mod: str, deterministic: bool) -> None:
    check_gradients(Case(mod, replace(SIZES, Q_LEN=9, KV_LEN=17)), deterministic)


@pytest.mark.parametrize("mod", ["full_bias", "pair_bias"])
def test_tables_of_whole_tiles(mod: str) -> None:
    """Read without clamping, and a gradient of its own stored, where no lane is outside."""
    check_gradients(Case(mod, replace(SIZES, Q_LEN=128, KV_LEN=256), FP16), False)


def test_captured_gradients_repeat_bitwise() -> None:
    check_repeats(Case("captured_twice", SIZES), "cpu", times=1)


@pytest.mark.parametrize(
    ("dtype", "mod"), half_slow([FP64, BF16, FP16], ["causal", "softcap"]), ids=str
)
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check_gradients(Case(mod, SIZES, dtype), False)


def test_fixed_point_in_float64() -> None:
    check_gradients(Case("relative_bias", SIZES, FP64), True)


@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (72, 40), (16, 320), (300, 300)])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    """Halves take the head dimension in chunks, float32 in slices."""
    check_gradients(Case("causal", replace(SIZES, Hq=1, D=D, Dv=Dv), dtype), False)


@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), [(1, 1), (63, 1), (65, 129)])
@pytest.mark.parametrize("mod", ["head_slope", "sliding_window"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int) -> None:
    check_gradients(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), FP16), True)


@pytest.mark.parametrize("block_size", [(16, 64), (64, 16)], ids=str)
def test_block_sizes(block_size: tuple[int, int]) -> None:
    sizes = replace(SIZES, Hq=1, Q_LEN=70, KV_LEN=90)
    check_gradients(Case("every_second_row", sizes, block_size=block_size), False)


@pytest.mark.parametrize("tiles", [((32, 128), (128, 64)), ((64, 128), (128, 32))], ids=str)
def test_a_tile_larger_than_a_block_reads_no_lists(
    tiles: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Candidates of 128 rows or keys met the blocks of 64 that the backward makes of short masks,
    and read lists at address 0."""
    keys, rows = (Tile(*sides, 4, 1) for sides in tiles)
    sizes = replace(SIZES, Hq=1, Q_LEN=130, KV_LEN=100, D=48)
    with PortableBackward(keys, rows).installed():
        check_gradients(Case("causal", sizes, FP16, block_size=(64, 64)), False)


@pytest.mark.parametrize("mod", ["left_padding", "nothing", "dilated_by_head"])
def test_masks_by_batch_and_head(mod: str) -> None:
    check_gradients(Case(mod, replace(SIZES, B=2, Hq=4, Hkv=2), FP16), False)


@pytest.mark.parametrize("layout", ["strided", "column_major"])
def test_layouts(layout: str) -> None:
    check_gradients(Case("causal", SIZES, layout=layout), False)


def test_head_groups() -> None:
    check_gradients(Case("causal_head_slope", replace(SIZES, B=2, Hq=6, Hkv=2), FP16), False)


def test_key_batch_of_one_sums_its_gradient_over_the_batch() -> None:
    check_gradients(Case("causal", replace(SIZES, B=3), kv_batch=1), False)


@pytest.mark.parametrize("mod", ["row_and_column", "full_bias"])
def test_captured_gradients_where_batch_entries_share_keys(mod: str) -> None:
    sizes = replace(SIZES, B=2, Q_LEN=9, KV_LEN=17)
    check_gradients(Case(mod, sizes, kv_batch=1), False)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scale(scale: float) -> None:
    check_gradients(Case("causal", SIZES, scale=scale), False)


def test_large_scores() -> None:
    check_gradients(Case("causal", SIZES, BF16, magnitude=30.0), False)


def test_mixed_dtypes() -> None:
    check_gradients(Case("causal", SIZES, FP32, kv_dtype=BF16), False)


def test_without_gradient_of_lse() -> None:
    check_gradients(Case("causal", SIZES, lse_gradient=False), False)


def _values(x: torch.Tensor, learned: torch.Tensor, score_mod, backend: str) -> list[torch.Tensor]:
    query, leaf = x.clone().requires_grad_(), learned.clone().requires_grad_()
    out = attnloom.flex_attention(
        query, x, x, score_mod=lambda *at: score_mod(leaf, *at), kernel_options={"backend": backend}
    )
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (query, leaf))]


def _row_of_a_computed_head(learned, score, b, h, q_idx, kv_idx):
    return score + (learned[h // 2] * torch.cos(learned[h // 2] * (q_idx - kv_idx))).sum()


def _sum_of_sums(learned, score, b, h, q_idx, kv_idx):
    inner = (learned[h] * kv_idx * 0.1).sum()
    return score + (learned[h] * inner * torch.sin(learned[q_idx % 4])).sum()


@pytest.mark.parametrize("score_mod", [_row_of_a_computed_head, _sum_of_sums])
def test_steps_of_a_reduction_find_what_they_read(score_mod) -> None:
    """What depends on the head alone was not in scope inside the loop over a captured row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 10, 16, generator=generator)
    learned = torch.randn(4, 3, generator=generator)
    expected = _values(x, learned, score_mod, "reference")
    for mine, exact in zip(_values(x, learned, score_mod, "triton"), expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)
