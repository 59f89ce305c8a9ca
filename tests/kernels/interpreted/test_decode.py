"""The Triton decode against the oracle: few queries, groups of heads, splits, sparse masks."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from attnloom.backends.triton import launch_decode, splits
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=1, KV_LEN=200, D=16, Dv=16)


def check(case: Case) -> None:
    check_attention(case, attnloom_with(backend="triton"), backward=False)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("mod", ["plain", "causal_lower_right", "relative_bias"])
def test_one_query(mod: str, dtype: torch.dtype) -> None:
    check(Case(mod, SIZES, dtype))


@pytest.mark.parametrize("Q_LEN", [3, 16])
@pytest.mark.parametrize("mod", ["causal_lower_right", "document_unsorted_per_batch", "rbf_bias"])
def test_few_queries(mod: str, Q_LEN: int) -> None:
    check(Case(mod, replace(SIZES, Q_LEN=Q_LEN)))


@pytest.mark.parametrize(("Hq", "Hkv"), [(5, 5), (8, 1), (14, 2)])
def test_head_groups(Hq: int, Hkv: int) -> None:
    check(Case("alibi", replace(SIZES, Hq=Hq, Hkv=Hkv)))


@pytest.mark.parametrize("KV_LEN", [1, 63, 64, 500])
def test_cache_lengths(KV_LEN: int) -> None:
    check(Case("causal_lower_right", replace(SIZES, B=1, Hq=2, Hkv=1, KV_LEN=KV_LEN)))


@pytest.mark.parametrize("mod", ["dilated_by_head", "key_padding", "nothing", "every_second_row"])
def test_masks_by_batch_and_head(mod: str) -> None:
    """Heads of a group with lists of their own, and queries in several blocks."""
    check(Case(mod, replace(SIZES, Q_LEN=20), block_size=16))


@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (96, 40), (200, 16)])
def test_head_dims(D: int, Dv: int) -> None:
    check(Case("causal_lower_right", replace(SIZES, B=1, D=D, Dv=Dv)))


@pytest.mark.parametrize("layout", ["transposed", "strided", "column_major"])
def test_layouts(layout: str) -> None:
    check(Case("causal_lower_right", replace(SIZES, Q_LEN=2), layout=layout))


def test_one_cache_for_a_batch_of_queries() -> None:
    check(Case("relative_bias", replace(SIZES, B=3), kv_batch=1))


@pytest.mark.parametrize("mod", ["causal_lower_right", "document_unsorted_per_batch", "plain"])
def test_more_splits_than_a_step_merges(mod: str) -> None:
    sizes = replace(SIZES, B=1, Hkv=1, Q_LEN=3, KV_LEN=500)
    with (
        mock.patch.object(splits, "_FEW", 2),
        mock.patch.object(splits, "_MERGED_ELEMENTS", 32),
        mock.patch.object(launch_decode, "_ready", {}) as ready,
    ):
        check(Case(mod, sizes, block_size=32))
        assert all(launch.num_splits > 2 for launch in ready.values())
