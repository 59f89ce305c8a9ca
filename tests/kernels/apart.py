"""Checks that may hang on a GPU, each in a process of its own (benchmarks/apart.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.apart import run_apart

LIMIT_S = 80.0  # compiling takes most of it
_TOLD_BEFORE_S = 5.0
_MOST_TEXT = 4000


def apart(check: Callable[..., None], *args: Any, limit: float = LIMIT_S) -> None:
    """Run a function of a test's module there, and fail as it does, or when its time is over.

    Args:
        check: found by its module and name. args: their `repr` is an expression of that module.
        limit: seconds; the process says where it is shortly before.
    """
    call = f"{check.__name__}({', '.join(map(repr, args))})"
    told = max(limit - _TOLD_BEFORE_S, limit / 2)
    code = (
        f"import faulthandler; faulthandler.dump_traceback_later({told})\n"
        f"from {check.__module__} import *\n{call}\n"
        "faulthandler.cancel_dump_traceback_later()"
    )
    ended = run_apart([sys.executable, "-c", code], limit)
    name = os.environ.get("PYTEST_CURRENT_TEST", call).removesuffix(" (call)")
    text = ended.text[-_MOST_TEXT:]
    if ended.status is None:
        pytest.fail(f"{name}: {call} was given up after {limit:g} s\n{text}", pytrace=False)
    if ended.status:
        pytest.fail(f"{name}: {call} ended with {ended.status}\n{text}", pytrace=False)
