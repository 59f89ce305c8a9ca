"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Idle threads of torch sleep: several test processes share the cores, and waiting by spinning,
# OpenMP's default, takes those from each other (on two of them, twice the processor time). Read
# once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests ask for the form that calls go on with; those of quick forms say so.
os.environ.setdefault("ATTNLOOM_QUICK_START", "0")

import pytest
import torch

from tests.harness.numeric_log import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

TESTS = Path(__file__).parent
# What a call means, where tests/kernels has how it is computed: harness/optimised_less.py.
ABOUT_MEANING = {"api", "cases", "fuzz", "integrations", "masks", "mods", "paged", "tools"}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests draw from generators of their own; this covers what slips through."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_masks_of_other_tests() -> None:
    """Every test builds its masks itself; those of one test may still reuse lists."""
    from attnloom.masking import reuse

    reuse.forget()


@pytest.fixture(autouse=True)
def _optimised_less(request: pytest.FixtureRequest) -> Iterator[None]:
    asked = request.node.get_closest_marker("optimised_less") is not None
    if not asked and request.path.relative_to(TESTS).parts[0] not in ABOUT_MEANING:
        yield
        return
    from tests.harness.optimised_less import optimised_less

    with optimised_less():
        yield
