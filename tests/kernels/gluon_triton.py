"""Beside which Triton tests of the Gluon kernels run."""

from __future__ import annotations

import os

import pytest

# Gluon differs from version to version: what the kernels are for, and what parts of them also take.
VERSION, ALSO = (3, 6), (3, 9)


def takes_gluon(also: bool = False) -> bool:
    """also: those parts are enough."""
    found = tuple(int(n) for n in pytest.importorskip("triton").__version__.split(".")[:2])
    return found == VERSION or (also and found == ALSO)


def needs_gluon(also: bool = False) -> None:
    """Skip a test, or its module, beside other versions; `./check gluon` runs every file that asks
    this beside the right one, where being skipped is a failure."""
    if takes_gluon(also):
        return
    message = "the Gluon kernels are for Triton 3.6"
    assert "ATTNLOOM_NEEDS_GLUON" not in os.environ, message
    pytest.skip(message, allow_module_level=True)
