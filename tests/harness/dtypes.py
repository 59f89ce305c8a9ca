"""Lists of dtypes to parametrise over."""

from collections.abc import Iterable

import pytest
import torch

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP64, FP32, BF16, FP16)
# For what hardly depends on the dtype: the rarer two only outside the quick run.
DTYPES_SPARING = (
    FP32,
    BF16,
    pytest.param(FP64, marks=pytest.mark.slow),
    pytest.param(FP16, marks=pytest.mark.slow),
)


def in_turn(names: Iterable[str]) -> list[tuple[str, torch.dtype]]:
    """Each name with two of the four dtypes, and each dtype with half of the names: a kernel is
    compiled for every pair, and what a mod computes hardly depends on how operands are stored."""
    pairs = ((FP32, BF16), (FP64, FP16))
    return [(name, dtype) for i, name in enumerate(names) for dtype in pairs[i % 2]]
