"""The Triton kernel over pages against the oracle: page sizes, ragged queries, masks, splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.paged.draw import Problem, check

SMALL = Problem(lengths=(40, 3, 70), D=16, Dv=16, block=32)


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 1, 9)], ids=str)
@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_page_sizes_and_ragged_queries(page_size: int, counts: tuple) -> None:
    check(replace(SMALL, page_size=page_size, counts=counts, mask="causal"), "triton")


@pytest.mark.parametrize("mask", ["window", "by_head", "by_batch", "bidirectional", "nothing"])
def test_masks(mask: str) -> None:
    """bidirectional looks past the ends of sequences; by_head has other lists in a group."""
    check(replace(SMALL, counts=(2, 1, 3), mask=mask, block=16, score="alibi"), "triton")


def test_without_a_mask() -> None:
    check(replace(SMALL, counts=(1, 1, 1)), "triton")


def test_an_empty_sequence() -> None:
    check(replace(SMALL, lengths=(0, 1, 64), counts=(0, 1, 1), mask="causal"), "triton")


def test_one_cache_for_a_batch_of_queries() -> None:
    check(replace(SMALL, page_size=0, shared=True, mask="causal"), "triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes_and_odd_head_dims(dtype: torch.dtype) -> None:
    check(replace(SMALL, dtype=dtype, D=24, Dv=40, mask="causal", page_size=32), "triton")
