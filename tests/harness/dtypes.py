"""Lists of dtypes to parametrise over."""

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
