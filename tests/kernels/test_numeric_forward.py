"""Forward of the public API against the oracle: shapes, layouts, dtypes, masks.

Gradients and the table of mods are in test_numeric_backward.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.case import LAYOUTS, Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.dtypes import BF16, DTYPES, DTYPES_SPARING, FP16, FP32, FP64, in_turn
from tests.harness.implementations import attnloom_with

SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=63, KV_LEN=100, D=16, Dv=16)


def check_forward(case: Case, backend: str = "cpu") -> None:
    check_attention(case, attnloom_with(backend=backend), backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mod", ["plain", "causal", "sliding_window", "relative_bias"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    check_forward(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("D", "Dv"),
    [(1, 1), (3, 5), (31, 31), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (64, 200)],
)
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    check_forward(Case("causal", replace(SIZES, D=D, Dv=Dv), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP64, FP16], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (31, 72), (96, 96), (192, 256), (320, 64)])
def test_head_dims_of_other_dtypes(D: int, Dv: int, dtype: torch.dtype) -> None:
    check_forward(Case("causal", replace(SIZES, D=D, Dv=Dv), dtype))


LENGTHS = [
    (1, 1),
    (1, 63),
    (63, 1),
    (63, 63),
    (64, 128),
    (65, 129),
    (17, 300),
    (300, 17),
    (127, 255),
]


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), LENGTHS)
@pytest.mark.parametrize("mod", ["plain", "sliding_window", "relative_bias"])
def test_lengths(mod: str, Q_LEN: int, KV_LEN: int, dtype: torch.dtype) -> None:
    check_forward(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("mod", ["causal", "relative_bias", "window_with_sinks"])
def test_length_1000(mod: str, dtype: torch.dtype) -> None:
    sizes = Sizes(B=1, Hq=2, Hkv=1, Q_LEN=1000, KV_LEN=1000, D=16, Dv=16)
    check_forward(Case(mod, sizes, dtype, block_size=128))


@pytest.mark.parametrize("mod", ["plain", "causal", "relative_bias"])
@pytest.mark.parametrize(("Q_LEN", "KV_LEN"), [(0, 0), (0, 5), (5, 0)])
def test_empty_lengths(mod: str, Q_LEN: int, KV_LEN: int) -> None:
    check_forward(Case(mod, replace(SIZES, Q_LEN=Q_LEN, KV_LEN=KV_LEN), FP32))


@pytest.mark.parametrize("change", [{"B": 0}, {"Hq": 0, "Hkv": 0}], ids=str)
def test_empty_batch_and_heads(change: dict[str, int]) -> None:
    check_forward(Case("plain", replace(SIZES, **change), FP32))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 3), (8, 1), (6, 2), (12, 4)])
def test_head_groups(Hq: int, Hkv: int, dtype: torch.dtype) -> None:
    check_forward(Case("causal_head_slope", replace(SIZES, Hq=Hq, Hkv=Hkv), dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check_forward(Case("relative_bias", SIZES, dtype, layout=layout))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_key_batch_of_one_is_broadcast(dtype: torch.dtype) -> None:
    check_forward(Case("causal", replace(SIZES, B=3), dtype, kv_batch=1))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(FP32, BF16), (BF16, FP32), (FP16, BF16), (FP32, FP16)], ids=str
)
def test_mixed_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check_forward(Case("causal", SIZES, dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, dtype: torch.dtype) -> None:
    check_forward(Case("causal", SIZES, dtype, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES_SPARING, ids=str)
def test_large_scores(dtype: torch.dtype) -> None:
    check_forward(Case("causal", SIZES, dtype, magnitude=30.0))


@pytest.mark.parametrize(
    "block_size", [16, 32, 64, 128, 256, 1024, (16, 128), (128, 16), (64, 256)], ids=str
)
@pytest.mark.parametrize(
    "mod", ["window_with_sinks", "document_unsorted_per_batch", "every_second_row", "prefix_or"]
)
def test_block_sizes(mod: str, block_size: int | tuple[int, int]) -> None:
    sizes = replace(SIZES, Q_LEN=200, KV_LEN=170)
    check_forward(Case(mod, sizes, FP32, block_size=block_size))


@pytest.mark.parametrize(
    ("mod", "dtype"),
    in_turn(["left_padding", "key_padding", "nothing", "every_second_row"]),
    ids=str,
)
def test_rows_without_keys(mod: str, dtype: torch.dtype) -> None:
    check_forward(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("mod", ["causal", "relative_bias", "document", "score_minus_inf"])
def test_reference_backend(mod: str) -> None:
    check_forward(Case(mod, SIZES, FP32), backend="reference")
