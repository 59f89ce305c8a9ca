"""A CUDA fault fails its own test only: no later one runs in the process that it spoilt."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

FAULT = 70


@pytest.fixture(autouse=True)
def _stops_at_a_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        message = f"{request.node.nodeid} left the device unusable: {fault}"
        if "PYTEST_XDIST_WORKER" in os.environ:  # a fresh worker takes over
            print(message, file=sys.stderr, flush=True)
            os._exit(FAULT)
        pytest.exit(message, FAULT)


@pytest.fixture
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as heads of 129 to 192 are concerned (gluon/few_steps.py)."""
    from attnloom.backends.gluon import launch_forward

    monkeypatch.setattr(launch_forward, "wants_short_steps", lambda call: False)
