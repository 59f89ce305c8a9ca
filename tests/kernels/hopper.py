"""Marks of tests that run on a Hopper GPU alone; `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
