"""What becomes of processes that do not end (benchmarks/apart.py)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import apart as module
from benchmarks.apart import run_apart
from tests.kernels.apart import apart


def fails(word: str) -> None:
    raise ValueError(word)


def hangs(started: str) -> None:
    Path(started).write_text(str(os.getpid()))
    time.sleep(600)


def passes(*given: object) -> None:
    assert given == (1, "two", (3, None))


def test_a_check_that_passes() -> None:
    apart(passes, 1, "two", (3, None))


def test_a_failure_has_the_name_of_the_test_and_the_traceback() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"test_a_failure_has_the_name.*fails\('word'"):
        apart(fails, "word")
    with pytest.raises(pytest.fail.Exception, match="ValueError: word"):
        apart(fails, "word")


def test_a_check_that_hangs_is_given_up_and_says_where(tmp_path: Path) -> None:
    started = str(tmp_path / "started")
    with pytest.raises(pytest.fail.Exception, match="was given up after 6 s") as caught:
        apart(hangs, started, limit=6)
    assert "in hangs" in str(caught.value)


def test_a_process_that_cannot_be_killed_hung_its_test() -> None:
    """`subprocess.run(timeout=...)` waits for the pipes of what it has killed."""
    command = [sys.executable, "-c", "print('so far', flush=True); import time; time.sleep(5)"]
    start = time.monotonic()
    with mock.patch.object(module.os, "killpg"):  # a kill without effect
        ended = run_apart(command, 1)
    assert ended.status is None
    assert ended.text == "so far\n"
    assert time.monotonic() - start < 4


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(2); open({str(alive)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_apart([sys.executable, "-c", code], 0.7).status is None
    time.sleep(2.5)
    assert not alive.exists()
