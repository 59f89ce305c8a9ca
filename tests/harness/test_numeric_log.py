"""The log of a run tells of every worker's tests, and of those before a run was cut short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import numeric_log

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("n", range(6))
def test_numbers(n):
    assert n != 3, "not three"

@pytest.mark.skip(reason="not here")
def test_left_out():
    pass

@pytest.mark.xfail
def test_wrong():
    assert False

def test_ends_everything():
    if "CUT_SHORT" in os.environ:
        os._exit(9)
"""


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """The log of a run of TESTS."""
    hooks = "from tests.harness.numeric_log import pytest_addoption, pytest_configure\n"
    (folder / "conftest.py").write_text(hooks)
    (folder / "test_given.py").write_text(TESTS)
    log = folder / "logs" / "numeric.log"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--numeric-log={log}", *arguments, "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        timeout=120,
    )
    return log.read_text()


def test_workers_are_added_up(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    found = run(tmp_path, "-n", "2")
    assert "6 passed, 1 failed, 1 skipped, 1 xfailed in " in found
    assert "test_given.py: 6 passed, 1 failed, 1 skipped, 1 xfailed" in found
    assert "failed: test_given.py::test_numbers[3]\nAssertionError: not three" in found
    assert "skipped 1: Skipped: not here" in found


def test_a_run_that_is_cut_short_leaves_what_failed(tmp_path: Path) -> None:
    found = run(tmp_path, CUT_SHORT="1")
    assert "3 passed, 1 failed so far, after " in found
    assert "failed: test_given.py::test_numbers[3]\nAssertionError: not three" in found


def test_the_end_of_a_long_reason_is_kept_and_no_path_of_a_machine() -> None:
    # a device's log once said where an error came from, and not what it was
    frames = [f'  File "{ROOT / "tests" / "a.py"}", line {n}, in work' for n in range(20)]
    text = "\n".join(["Failed: it ended with 1", *frames, "OutOfResources: shared memory"])
    report = SimpleNamespace(longrepr=text)
    lines = numeric_log._reason(report).splitlines()
    assert (lines[0], lines[-1]) == ("Failed: it ended with 1", "OutOfResources: shared memory")
    assert lines[2] == '  File "tests/a.py", line 15, in work'
    assert len(lines) == 8
