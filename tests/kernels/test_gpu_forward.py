"""The Triton forward on a real GPU against the oracle; `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.case import LAYOUTS, Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.harness.mods import MODS

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP64, FP32, BF16, FP16)
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=150, KV_LEN=270, D=64, Dv=64)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check(case: Case, **options) -> None:
    check_attention(case, attnloom_with("cuda", backend="triton", **options), backward=False)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mod", sorted(MODS))
def test_every_mod(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", ["plain", "causal", "relative_bias", "softcap"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


HEAD_DIMS = [(1, 1), (3, 5), (31, 31), (72, 40), (80, 80), (96, 96), (128, 128), (192, 128)]
HEAD_DIMS += [(64, 200), (256, 256), (320, 64), (512, 512)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "Dv"), HEAD_DIMS)
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), dtype, block_size=128))


@pytest.mark.parametrize(("D", "Dv"), [(31, 31), (72, 40), (96, 96), (192, 128), (64, 200)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_head_dims_of_decode(D: int, Dv: int, dtype: torch.dtype) -> None:
    """Case 54: D=96 failed for a single query only."""
    check(Case("causal", replace(SIZES, Q_LEN=1, D=D, Dv=Dv), dtype, block_size=128))


@pytest.mark.parametrize(("D", "Dv"), [(72, 40), (96, 96)])
def test_head_dims_in_small_blocks(D: int, Dv: int) -> None:
    """Tiles of 16 rows are multiplied by other instructions than those of 64 and more."""
    check(Case("causal", replace(SIZES, D=D, Dv=Dv), BF16, block_size=16))


LENGTHS = [(1, 1), (1, 63), (63, 1), (64, 128), (129, 257), (17, 1000), (1000, 17), (1000, 1000)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), LENGTHS)
@pytest.mark.parametrize("mod", ["plain", "sliding_window", "relative_bias"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int, dtype: torch.dtype) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), dtype, block_size=128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case("relative_bias", SIZES, dtype, layout=layout))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 1024, (16, 128), (128, 16)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "every_second_row", "dilated_by_head"])
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    check(Case(mod, SIZES, BF16, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", ["left_padding", "key_padding", "nothing", "every_second_row"])
def test_rows_without_keys(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 3), (8, 1), (6, 2), (12, 4)])
def test_head_groups(Hq: int, Hkv: int) -> None:
    check(Case("causal_head_slope", replace(SIZES, Hq=Hq, Hkv=Hkv), BF16))


def test_key_batch_of_one_is_broadcast() -> None:
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(FP32, BF16), (BF16, FP32), (FP16, BF16), (FP32, FP16)], ids=str
)
def test_mixed_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(Case("causal", SIZES, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, dtype: torch.dtype) -> None:
    check(Case("causal", SIZES, dtype, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype: torch.dtype) -> None:
    check(Case("causal", SIZES, dtype, magnitude=30.0))


@pytest.mark.parametrize("mod", ["softcap", "alibi", "rbf_bias"])
def test_exact_math(mod: str) -> None:
    check(Case(mod, SIZES, BF16), exact_math=True)


def test_tf32x3_is_nearly_float32() -> None:
    check(Case("causal", SIZES, FP32), fp32_precision="tf32x3")


@pytest.mark.parametrize("mod", ["plain", "causal", "causal_head_slope"])
def test_repeated_calls_start_the_same_kernel_on_new_tensors(mod: str) -> None:
    """From the second call on, launches go past Triton's own binding of arguments."""
    for seed in range(3):
        check(Case(mod, SIZES, BF16, seed=seed))
        check(Case(mod, replace(SIZES, Q_LEN=1), BF16, seed=seed))
