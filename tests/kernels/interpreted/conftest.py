"""These tests run Triton kernels under its interpreter, in a process started with
TRITON_INTERPRET=1.

`tests/kernels/test_triton_interpreted.py` starts that process; elsewhere they are not collected,
because Triton reads the variable once, when it is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.interpreting import language_replaced_once

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once() -> Iterator[None]:
    with language_replaced_once():
        yield
