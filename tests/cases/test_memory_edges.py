"""Reads beyond a tensor, which most often go unnoticed: see memory_edges.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.memory_edges import DTYPES, INTERPRETED_DTYPES, INTERPRETED_SIZES, SIZES

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect of its C library")


def check(num_runs: int, *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "tests.cases.memory_edges", "--beyond", *options]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # the last read is one too far, to see that it is noticed
    assert len(done.stdout.splitlines()) == num_runs, done.stderr[-2000:]
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


@pytest.mark.slow
@needs_linux
def test_case_030_nothing_beyond_an_input_is_read() -> None:
    """A small reproducer faulted when its output was read, after the kernel had gone too far."""
    check(2 * len(SIZES) * len(DTYPES))


@pytest.mark.slow
@needs_linux
def test_case_030_triton_kernels_read_nothing_beyond_an_input() -> None:
    pytest.importorskip("triton")
    num_runs = 2 * len(INTERPRETED_SIZES) * len(INTERPRETED_DTYPES)
    check(num_runs, "--triton", TRITON_INTERPRET="1")
