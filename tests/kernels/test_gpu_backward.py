"""The Triton backward on a real GPU against the oracle; `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.case import LAYOUTS, Case
from tests.harness.draw import Sizes
from tests.harness.mods import MODS
from tests.kernels.backward_modes import check_gradients, check_repeats

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP64, FP32, BF16, FP16)
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=170, D=64, Dv=64)
SMALL = replace(SIZES, Q_LEN=40, KV_LEN=70, D=16, Dv=16)
LEARNED = sorted(name for name, mod in MODS.items() if mod.learnable)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check(case: Case, deterministic: bool = False, **options) -> None:
    check_gradients(case, deterministic, "cuda", **options)


@pytest.mark.parametrize("mod", sorted(MODS))
def test_every_mod(mod: str) -> None:
    check(Case(mod, SIZES, BF16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", ["plain", "causal", "relative_bias", "learned_softcap"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("mod", LEARNED)
def test_deterministic_captured_gradients(mod: str) -> None:
    check(Case(mod, SMALL, FP32), deterministic=True)


@pytest.mark.parametrize("mod", ["relative_bias", "captured_twice", "pair_bias", "rbf_bias"])
def test_deterministic_gradients_repeat_bitwise(mod: str) -> None:
    check_repeats(Case(mod, SIZES, BF16), "cuda", times=3)


HEAD_DIMS = [(1, 3), (31, 31), (72, 40), (96, 96), (128, 128), (192, 128), (64, 200), (256, 256)]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [*HEAD_DIMS, (320, 64), (512, 512)])
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), dtype, block_size=128))


@pytest.mark.parametrize(("D", "Dv"), [(72, 40), (96, 96)])
def test_head_dims_in_small_blocks(D: int, Dv: int) -> None:
    """Tiles of 16 rows are multiplied by other instructions than those of 64 and more."""
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, block_size=16))


LENGTHS = [(1, 1), (1, 63), (63, 1), (129, 257), (17, 1000), (1000, 17)]


@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), LENGTHS)
@pytest.mark.parametrize("mod", ["plain", "sliding_window", "relative_bias"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), BF16, block_size=128))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case("relative_bias", SIZES, dtype, layout=layout))


@pytest.mark.parametrize("block_size", [16, 64, 256, (16, 128), (128, 16)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "every_second_row", "dilated_by_head"])
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    check(Case(mod, SIZES, BF16, block_size=block_size))


@pytest.mark.parametrize("mod", ["left_padding", "key_padding", "nothing", "every_second_row"])
def test_rows_without_keys(mod: str) -> None:
    check(Case(mod, SIZES, BF16))


@pytest.mark.parametrize(("Hq", "Hkv"), [(8, 1), (6, 2), (12, 4)])
def test_head_groups(Hq: int, Hkv: int) -> None:
    check(Case("causal_head_slope", replace(SIZES, Hq=Hq, Hkv=Hkv), BF16))


def test_key_batch_of_one_sums_its_gradient_over_the_batch() -> None:
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, BF16), (BF16, FP32)], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(Case("causal", SIZES, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float) -> None:
    check(Case("causal", SIZES, BF16, scale=scale))


def test_without_gradient_of_lse() -> None:
    check(Case("relative_bias", SIZES, BF16, lse_gradient=False))
