"""Settings shared by all tests."""

from __future__ import annotations

import pytest
import torch

from tests.harness.numeric_log import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests draw from generators of their own; this covers what slips through."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_masks_of_other_tests() -> None:
    """Every test builds its masks itself; those of one test may still reuse lists."""
    from attnloom.masking import reuse

    reuse.forget()
