"""What a compiled kernel takes of a device, read from its binary: no driver loads it."""

from __future__ import annotations

import re
import subprocess
import tempfile

_LOCAL = re.compile(r"\b(?:STACK|LOCAL):(\d+)")


def spills_of(cubin: bytes) -> int:
    """Registers that each thread of the kernel keeps in memory, as the driver tells of a loaded
    one.

    Raises:
        OSError, CalledProcessError: Triton came without cuobjdump, or it fails.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in _LOCAL.findall(said)) // 4
