"""The Triton forward against the oracle: every mod, dtype, layout, block size, length."""

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
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=40, KV_LEN=70, D=16, Dv=16)


def check(case: Case) -> None:
    check_attention(case, attnloom_with(backend="triton"), backward=False)


@pytest.mark.parametrize("mod", sorted(MODS))
def test_every_mod(mod: str) -> None:
    check(Case(mod, replace(SIZES, B=1, Hq=2, Hkv=1)))


@pytest.mark.parametrize("dtype", [FP64, BF16, FP16], ids=str)
@pytest.mark.parametrize("mod", ["plain", "causal", "softcap", "relative_bias"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, replace(SIZES, B=1, Hq=2, Hkv=1), dtype))


@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (31, 31), (72, 40), (96, 96), (200, 16), (16, 320)])
def test_head_dims(D: int, Dv: int) -> None:
    check(Case("causal", replace(SIZES, B=1, Hq=1, Hkv=1, D=D, Dv=Dv)))


@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), [(1, 1), (63, 1), (64, 128), (65, 129), (17, 300)])
@pytest.mark.parametrize("mod", ["plain", "sliding_window"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int) -> None:
    check(Case(mod, replace(SIZES, B=1, Hq=2, Hkv=1, Q_LEN=Q_LEN, KV_LEN=KV_LEN)))


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str) -> None:
    check(Case("relative_bias", SIZES, layout=layout))


@pytest.mark.parametrize("block_size", [(16, 128), (128, 16), (64, 256)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "every_second_row"])
def test_block_sizes(mod: str, block_size: tuple[int, int]) -> None:
    sizes = replace(SIZES, B=1, Hq=2, Hkv=1, Q_LEN=130, KV_LEN=170)
    check(Case(mod, sizes, block_size=block_size))


@pytest.mark.parametrize("mod", ["left_padding", "key_padding", "nothing", "dilated_by_head"])
def test_masks_by_batch_and_head(mod: str) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=33)))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float) -> None:
    check(Case("causal", replace(SIZES, B=1, Hq=2, Hkv=1), scale=scale))


def test_large_scores() -> None:
    check(Case("causal", replace(SIZES, B=1, Hq=2, Hkv=1), BF16, magnitude=30.0))


def test_key_batch_of_one_is_broadcast() -> None:
    check(Case("causal", replace(SIZES, B=3), kv_batch=1))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, BF16), (FP16, BF16)], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(Case("causal", replace(SIZES, B=1, Hq=2, Hkv=1), dtype, kv_dtype=kv_dtype))
