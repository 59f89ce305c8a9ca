"""The Gluon backward on a Hopper GPU against the oracle; `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import LAYOUTS, Case
from tests.harness.draw import Sizes
from tests.harness.mods import MODS

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=290, D=64, Dv=64)
WIDE = replace(SIZES, D=128, Dv=128)
# One score is not worth a tile: the oracle of this one gathers [H, Q, KV] for each of them.
SLOW_ORACLE = ("chained_bias",)
PLAIN = ["plain", "causal", "softcap", "alibi"]


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper GPU"),
]


def check(case: Case, portable: bool = False, **options) -> None:
    from tests.kernels.gluon_backward import check_gradients

    check_gradients(case, portable, **options)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("mod", sorted(set(MODS) - set(SLOW_ORACLE)))
def test_every_mod(mod: str, D: int) -> None:
    check(Case(mod, replace(SIZES, D=D, Dv=D), BF16, block_size=128))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["D64", "D128"])
@pytest.mark.parametrize("mod", [*PLAIN, "relative_bias", "learned_softcap"])
def test_fp16(mod: str, sizes: Sizes) -> None:
    check(Case(mod, sizes, FP16, block_size=128))


HEAD_DIMS = [(8, 16), (32, 32), (72, 40), (96, 96), (64, 128), (128, 64)]


@pytest.mark.parametrize(("D", "Dv"), HEAD_DIMS)
def test_head_dims(D: int, Dv: int) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, block_size=128))


@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (256, 256)])
def test_wide_heads_are_left_to_the_portable_kernels(D: int, Dv: int) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, block_size=128), portable=True)


LENGTHS = [(1, 1), (1, 63), (63, 1), (64, 128), (129, 257), (17, 1000), (1000, 17)]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), LENGTHS)
@pytest.mark.parametrize("mod", ["plain", "sliding_window", "relative_bias"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int, D: int) -> None:
    sizes = replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN, D=D, Dv=D)
    check(Case(mod, sizes, BF16, block_size=128))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["D64", "D128"])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str, sizes: Sizes) -> None:
    check(Case("relative_bias", sizes, BF16, layout=layout, block_size=128))


@pytest.mark.parametrize("block_size", [256, (64, 128), (512, 128), (64, 1024)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "every_second_row", "dilated_by_head"])
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=700, KV_LEN=600), BF16, block_size=block_size))


def test_small_blocks_are_left_to_the_portable_kernels() -> None:
    check(Case("causal", SIZES, BF16, block_size=32), portable=True)


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["D64", "D128"])
@pytest.mark.parametrize("mod", ["left_padding", "key_padding", "nothing", "every_second_row"])
def test_rows_without_keys(mod: str, sizes: Sizes) -> None:
    check(Case(mod, sizes, BF16, block_size=128))


@pytest.mark.parametrize("mod", ["causal_head_slope", "dilated_by_head", "relative_bias"])
@pytest.mark.parametrize(("Hq", "Hkv"), [(3, 3), (8, 1), (6, 2)])
def test_head_groups(Hq: int, Hkv: int, mod: str) -> None:
    check(Case(mod, replace(WIDE, Hq=Hq, Hkv=Hkv), BF16, block_size=128))


@pytest.mark.parametrize("mod", ["causal", "relative_bias"])
def test_key_batch_of_one_sums_its_gradient_over_the_batch(mod: str) -> None:
    check(Case(mod, replace(SIZES, B=3), BF16, kv_batch=1, block_size=128))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["D64", "D128"])
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, sizes: Sizes) -> None:
    check(Case("causal", sizes, BF16, scale=scale, block_size=128))


@pytest.mark.parametrize("sizes", [SIZES, WIDE], ids=["D64", "D128"])
@pytest.mark.parametrize("mod", ["plain", "causal"])
def test_scores_that_overflow_where_keys_end(mod: str, sizes: Sizes) -> None:
    """Keys past KV_LEN are zeros: against an lse far below zero, exp(0 - lse) is infinite."""
    check(Case(mod, sizes, BF16, magnitude=30.0, block_size=128))


def test_without_gradient_of_lse() -> None:
    check(Case("relative_bias", SIZES, BF16, lse_gradient=False, block_size=128))


@pytest.mark.parametrize("mod", ["softcap", "rbf_bias"])
def test_exact_math(mod: str) -> None:
    check(Case(mod, SIZES, BF16, block_size=128), exact_math=True)


@pytest.mark.parametrize("mod", ["plain", "causal", "causal_head_slope"])
def test_repeated_calls_start_the_same_kernel_on_new_tensors(mod: str) -> None:
    """From the second call on, launches go past Triton's own binding of arguments."""
    for seed in range(3):
        check(Case(mod, SIZES, BF16, seed=seed, block_size=128))
