"""Reads beyond a tensor, which most often go unnoticed: see memory_edges.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.memory_edges import DTYPES, SIZES


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect of Linux's C library")
def test_case_030_nothing_beyond_an_input_is_read() -> None:
    """A small reproducer faulted when its output was read, after the kernel had gone too far."""
    command = [sys.executable, "-m", "tests.cases.memory_edges", "--beyond"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    # the last read is one too far, to see that it is noticed
    assert len(done.stdout.splitlines()) == 2 * len(SIZES) * len(DTYPES), done.stderr[-2000:]
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
