"""Forward and gradients of the public API against the oracle, over the whole table of mods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness.case import LAYOUTS, Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.dtypes import BF16, DTYPES, DTYPES_SPARING, FP16, FP32, FP64, in_turn
from tests.harness.implementations import attnloom_with
from tests.harness.mods import MODS

# The same head dimension throughout: it is a compile-time constant of a kernel.
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=63, KV_LEN=80, D=16, Dv=16)
SMALL = replace(SIZES, Q_LEN=20, KV_LEN=37)
CORE = ("plain", "causal", "causal_head_slope", "relative_bias", "document_relative_softcap")


def check(case: Case, backend: str = "cpu") -> None:
    check_attention(case, attnloom_with(backend=backend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", CORE)
def test_core_mods(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.slow
@pytest.mark.optimised_less
@pytest.mark.parametrize("mod", sorted(set(MODS) - set(CORE)))
def test_every_mod_in_float32(mod: str) -> None:
    check(Case(mod, SIZES, FP32))


def others() -> Iterator[Any]:
    """Every mod with a dtype. Scores and captured tensors are float32 with halves too: of mods that
    learn nothing, the fragments are then those of float32, and CORE has the kernels around them."""
    for n, mod in enumerate(sorted(set(MODS) - set(CORE))):
        dtype = (BF16, FP16, FP64)[n % 3]
        alike = dtype is not FP64 and not MODS[mod].learnable
        yield pytest.param(mod, dtype, marks=pytest.mark.long if alike else pytest.mark.slow)


@pytest.mark.optimised_less
@pytest.mark.parametrize(("mod", "dtype"), others(), ids=str)
def test_every_mod_in_another_dtype(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize(
    ("Q_LEN", "KV_LEN"), [(1, 1), (1, 63), (63, 1), (65, 129), (17, 300), (300, 17)]
)
@pytest.mark.parametrize("mod", ["plain", "relative_bias"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int, dtype: torch.dtype) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("mod", ["causal", "relative_bias"])
def test_length_1000(mod: str, dtype: torch.dtype) -> None:
    sizes = Sizes(B=1, Hq=2, Hkv=1, Q_LEN=1000, KV_LEN=1000, D=16, Dv=16)
    check(Case(mod, sizes, dtype, block_size=128))


@pytest.mark.parametrize("mod", ["plain", "causal", "relative_bias"])
@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), [(0, 5), (5, 0)])
def test_empty_lengths(mod: str, Q_LEN: int, KV_LEN: int) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), FP32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("D", "Dv"), [(1, 1), (3, 5), (31, 31), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128)]
)
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    check(Case("causal", replace(SMALL, D=D, Dv=Dv), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP64, FP16], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (31, 72), (96, 96)])
def test_head_dims_of_other_dtypes(D: int, Dv: int, dtype: torch.dtype) -> None:
    check(Case("causal", replace(SMALL, D=D, Dv=Dv), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 3), (8, 1), (6, 2)])
def test_head_groups(Hq: int, Hkv: int, dtype: torch.dtype) -> None:
    check(Case("causal_head_slope", replace(SMALL, Hq=Hq, Hkv=Hkv), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case("relative_bias", SMALL, dtype, layout=layout))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_key_batch_of_one_sums_its_gradient_over_the_batch(dtype: torch.dtype) -> None:
    check(Case("causal", replace(SMALL, B=3), dtype, kv_batch=1))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, BF16), (BF16, FP32), (FP16, BF16)], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(Case("causal", SMALL, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, dtype: torch.dtype) -> None:
    check(Case("causal", SMALL, dtype, scale=scale))


@pytest.mark.parametrize(
    ("mod", "dtype"),
    in_turn(["left_padding", "key_padding", "nothing", "every_second_row"]),
    ids=str,
)
def test_rows_without_keys_give_no_gradient(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SMALL, dtype))


@pytest.mark.parametrize("block_size", [16, 64, 256, (16, 128), (128, 16)], ids=str)
@pytest.mark.parametrize("mod", ["window_with_sinks", "document_relative_softcap"])
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=150, KV_LEN=170), FP32, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
def test_without_gradient_of_lse(dtype: torch.dtype) -> None:
    check(Case("relative_bias", SMALL, dtype, lse_gradient=False))


@pytest.mark.parametrize(
    ("mod", "dtype"),
    in_turn([*CORE, "rbf_bias", "prefix_or", "left_padding", "singular_where_masked"]),
    ids=str,
)
def test_tiled_backend(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SMALL, dtype), backend="tiled")


@pytest.mark.parametrize("mod", ["relative_bias", "causal_head_slope", "if_statement"])
def test_reference_backend(mod: str) -> None:
    check(Case(mod, SMALL, FP32), backend="reference")
