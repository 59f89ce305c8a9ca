"""Files of the Triton backends, in the user's cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from attnloom.backends.cpu.cache import default_folder


def folder(name: str) -> Path:
    """A folder in attnloom's cache, which exists."""
    found = default_folder() / name
    found.mkdir(parents=True, exist_ok=True)
    return found


def write(path: Path, text: str) -> None:
    """Write beside the target and rename, so that no reader sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).replace(path)
