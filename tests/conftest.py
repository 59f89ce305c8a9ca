"""Settings shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests draw from generators of their own; this covers what slips through."""
    torch.manual_seed(0)
