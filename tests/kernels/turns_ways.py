"""Other ways to assemble Gluon kernels, to be tried by turns.py: is one of the compiler's habits
what interrupted kernels die of? Each changes the PTX of kernels whose warps are divided. None of
these made a difference to kernels that lost tiles (docs/log.md, 2026-11-30)."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

_DIVIDED = "setmaxnreg"
_CACHES = ("TRITON_CACHE_DIR", "ATTNLOOM_CACHE_DIR")
# name -> (pattern, what is in its place)
WAYS: dict[str, tuple[str, str]] = {
    # no warp gives registers to another
    "registers alike": (r"\n[^\n]*setmaxnreg[^\n]*", ""),
    # the first partition meets at a barrier of its own, not at the one of whole programs
    "another barrier": (r"bar\.sync(\s+)0, 128;", r"bar.sync\g<1>9, 128;"),
    # who waits for an mbarrier asks again and again; nothing suspends a warp
    "asks": (r"mbarrier\.try_wait\.parity", "mbarrier.test_wait.parity"),
    # who stores by TMA waits until memory has it, not only until shared memory is read
    "waits for memory": (r"cp\.async\.bulk\.wait_group\.read", "cp.async.bulk.wait_group"),
}


def changed(way: str, ptx: str) -> str:
    """PTX assembled in a way; that of other kernels as it is.

    Raises:
        AssertionError: nothing would change, so that the way would show nothing.
    """
    if _DIVIDED not in ptx:
        return ptx
    found = re.sub(*WAYS[way], ptx)
    assert found != ptx, f"{way} changes nothing"
    return found


def install(way: str) -> None:
    """Kernels that are compiled from now on are assembled so, and kept nowhere."""
    from triton.backends.nvidia.compiler import CUDABackend

    folder = tempfile.mkdtemp()
    for name in _CACHES:
        os.environ[name] = folder
    assemble = CUDABackend.make_cubin

    def otherwise(self: Any, ptx: str, *rest: Any) -> Any:
        return assemble(self, changed(way, ptx), *rest)

    CUDABackend.make_cubin = otherwise
