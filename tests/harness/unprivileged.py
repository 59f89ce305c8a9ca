"""A folder that the tests may not write to, whoever runs them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def read_only_folder() -> Iterator[Path]:
    """An empty one. Inside, root, who may write anywhere, is nobody."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        with _nobody() if os.getuid() == 0 else contextlib.nullcontext():
            yield Path(name)


@contextlib.contextmanager
def _nobody() -> Iterator[None]:
    os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
