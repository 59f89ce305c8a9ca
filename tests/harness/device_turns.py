"""Which test processes may use a device at once: all of them, or one alone.

Kernels that are interrupted in favour of another process were seen to lose tiles (docs/log.md,
2026-11-30). Tests are short enough for that not to happen; those that are not are marked `alone`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"attnloom-tests-{os.getuid()}"


@contextlib.contextmanager
def held(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Inside, nobody else is (alone), or nobody who wants to be alone. Who waits to be alone is
    waited for by all who come later."""
    folder = folder or _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield  # files that are closed let go
