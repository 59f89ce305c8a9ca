"""Whether a tensor is a DTensor, asked without importing torch.distributed."""

from __future__ import annotations

import sys
from typing import Any


def is_dtensor(*tensors: Any) -> bool:
    """Whether one of them is a DTensor; there is none before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)
