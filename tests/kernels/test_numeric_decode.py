"""Few queries against many keys: the decode kernel, with a cache offset and grouped heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.dtypes import BF16, DTYPES_SPARING, FP16, FP32, in_turn
from tests.harness.implementations import attnloom_with

SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=1, KV_LEN=500, D=64, Dv=64)


def check_decode(case: Case, backend: str = "cpu") -> None:
    check_attention(case, attnloom_with(backend=backend), backward=False)


@pytest.mark.parametrize(
    ("mod", "dtype"),
    in_turn(["plain", "causal_lower_right", "relative_bias", "key_padding"]),
    ids=str,
)
def test_one_query(mod: str, dtype: torch.dtype) -> None:
    check_decode(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("Q_LEN", [2, 3, 7, 8, 16])
def test_few_queries(Q_LEN: int, dtype: torch.dtype) -> None:
    check_decode(Case("causal_lower_right", replace(SIZES, Q_LEN=Q_LEN), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (5, 5), (8, 1), (32, 1), (14, 2), (12, 4)])
def test_head_groups(Hq: int, Hkv: int, dtype: torch.dtype) -> None:
    check_decode(Case("relative_bias", replace(SIZES, Hq=Hq, Hkv=Hkv), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("KV_LEN", [1, 15, 16, 63, 64, 127, 129, 1000, 2049])
def test_cache_lengths(KV_LEN: int, dtype: torch.dtype) -> None:
    check_decode(Case("causal_lower_right", replace(SIZES, KV_LEN=KV_LEN), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (31, 31), (96, 96), (128, 128), (192, 128)])
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    """Head dimension 96 failed elsewhere in decode only (case 54)."""
    check_decode(Case("causal_lower_right", replace(SIZES, D=D, Dv=Dv), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "strided", "padded_rows", "column_major"])
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check_decode(Case("causal_lower_right", SIZES, dtype, layout=layout))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_one_cache_for_a_batch_of_queries(dtype: torch.dtype) -> None:
    check_decode(Case("relative_bias", replace(SIZES, B=3), dtype, kv_batch=1))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, BF16), (BF16, FP32), (FP16, BF16)], ids=str)
def test_cache_in_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check_decode(Case("causal_lower_right", SIZES, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mod", ["nothing", "every_second_row", "document_unsorted_per_batch"])
def test_sparse_rows(mod: str, dtype: torch.dtype) -> None:
    check_decode(Case(mod, replace(SIZES, Q_LEN=4), dtype))


DECODED = (
    "alibi", "softcap", "window_with_sinks", "bool_table_mask", "rbf_bias", "if_statement",
    "full_bias", "temperature", "int8_table", "natten_2d",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.optimised_less
@pytest.mark.parametrize(
    ("mod", "dtype"),
    [(mod, dtype) for i, mod in enumerate(DECODED) for dtype in (FP32, (BF16, FP16)[i % 2])],
    ids=str,
)
def test_mods(mod: str, dtype: torch.dtype) -> None:
    check_decode(Case(mod, replace(SIZES, Q_LEN=2, KV_LEN=300), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mod", ["causal_lower_right", "relative_bias"])
def test_tiled_backend(mod: str, dtype: torch.dtype) -> None:
    check_decode(Case(mod, SIZES, dtype), backend="tiled")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_of_one_query(dtype: torch.dtype) -> None:
    check_attention(
        Case("relative_bias", replace(SIZES, D=16, Dv=16), dtype), attnloom_with(backend="cpu")
    )
