"""The kernels of a decoder between its products, against float64."""

from __future__ import annotations

import pytest
import torch

from attnloom.serving.ops import Heads
from tests.serving.row_ops import (
    DTYPES,
    check_appends,
    check_gates,
    check_norms,
    check_rotation,
)

HEADS = [Heads(4, 2, 16), Heads(9, 1, 24), Heads(5, 5, 8), Heads(32, 8, 128)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gemma", [False, True])
def test_norms(gemma: bool, dtype: torch.dtype) -> None:
    for num_tokens, size in ((1, 64), (3, 1000), (2, 4096)):
        check_norms(dtype, "cpu", num_tokens, size, gemma)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotations_and_appends(heads: Heads, dtype: torch.dtype) -> None:
    for num_tokens in (1, 3):
        check_rotation(dtype, "cpu", num_tokens, heads)
        check_appends(dtype, "cpu", num_tokens, heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gates(activation: str, dtype: torch.dtype) -> None:
    for num_tokens, size in ((1, 1024), (3, 1000), (2, 1408)):
        check_gates(dtype, "cpu", num_tokens, size, activation)
