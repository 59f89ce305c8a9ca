"""Settings shared by all tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--numeric-log", metavar="FILE", type=Path, help="write there what passed on which device"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--numeric-log")
    if path is not None:
        from tests.harness import numeric_log

        numeric_log.write(path, terminalreporter.stats, time.monotonic() - _BEGAN)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests draw from generators of their own; this covers what slips through."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_masks_of_other_tests() -> None:
    """Every test builds its masks itself; those of one test may still reuse lists."""
    from attnloom.masking import reuse

    reuse.forget()
