"""Run the tests of tests/kernels/interpreted in a process where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


NO_TESTS = 5  # pytest's exit status


def interpret(name: str, marks: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("-m", marks, str(FOLDER / name)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    allowed = (0, NO_TESTS) if marks == "slow" else (0,)
    assert done.returncode in allowed, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str) -> None:
    interpret(name, "not slow")


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_interpreted_slow(name: str) -> None:
    interpret(name, "slow")
