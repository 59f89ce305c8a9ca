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
# A process takes four seconds to start, which is what many files take to run.
LONGEST = (["test_backward.py"], ["test_decode.py", "test_forward.py"])
GROUPS = (*LONGEST, [name for name in FILES if not any(name in group for group in LONGEST)])
NO_TESTS = 5  # pytest's exit status


def interpret(names: list[str], marks: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("-m", marks, *(str(FOLDER / name) for name in names)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    allowed = (0, NO_TESTS) if marks == "slow" else (0,)
    assert done.returncode in allowed, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_interpreted(names: list[str]) -> None:
    interpret(names, "not slow")


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_interpreted_slow(name: str) -> None:
    interpret([name], "slow")
