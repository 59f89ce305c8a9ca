"""Other ways to assemble Gluon kernels, to be tried by turns.py: is one of the compiler's habits
what interrupted kernels die of? Each changes the PTX of kernels whose warps are divided."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

_DIVIDED = "setmaxnreg"
_CACHES = ("TRITON_CACHE_DIR", "ATTNLOOM_CACHE_DIR")


def _registers_alike(ptx: str) -> str:
    """No warp gives registers to another. Seen: tiles are lost all the same."""
    return re.sub(r"\n[^\n]*setmaxnreg[^\n]*", "", ptx)


def _another_barrier(ptx: str) -> str:
    """The first partition meets at a barrier of its own, not at the one of whole programs."""
    return re.sub(r"bar\.sync(\s+)0, 128;", r"bar.sync\g<1>9, 128;", ptx)


def _nobody_waits_for_all(ptx: str) -> str:
    """Barriers of all warps name how many they are."""
    threads = re.search(r"\.reqntid (\d+)", ptx)
    assert threads is not None
    return re.sub(r"barrier\.sync(\s+)1;", rf"barrier.sync\g<1>1, {threads[1]};", ptx)


def _waits_by_asking(ptx: str) -> str:
    """Who waits for an mbarrier asks again and again; nothing suspends a warp."""
    return ptx.replace("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")


def _waits_for_memory(ptx: str) -> str:
    """Who stores by TMA waits until memory has it, not only until shared memory is read."""
    return ptx.replace("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group")


def _may_part(ptx: str) -> str:
    """Nobody promises that the lanes of a warp see an mbarrier's phase end at once."""
    return ptx.replace("bra.uni waitLoop", "bra waitLoop")


def _meets_again(ptx: str) -> str:
    """Lanes that waited for an mbarrier wait for each other."""
    again = "@!complete bra waitLoop;\nbar.warp.sync 0xffffffff;"
    return ptx.replace("@!complete bra.uni waitLoop;", again)


def _votes(ptx: str) -> str:
    """The lanes of a warp agree that an mbarrier's phase ended."""
    vote = "vote.sync.all.pred complete, complete, 0xffffffff;\n@!complete bra.uni waitLoop;"
    return ptx.replace("@!complete bra.uni waitLoop;", vote)


WAYS: dict[str, Callable[[str], str]] = {
    "registers alike": _registers_alike,
    "another barrier": _another_barrier,
    "counted barrier": _nobody_waits_for_all,
    "asks": _waits_by_asking,
    "waits for memory": _waits_for_memory,
    "may part": _may_part,
    "meets again": _meets_again,
    "votes": _votes,
}


def changed(way: str, ptx: str) -> str:
    """PTX assembled in a way; that of other kernels as it is.

    Raises:
        AssertionError: nothing would change, so that the way would show nothing.
    """
    if _DIVIDED not in ptx:
        return ptx
    found = WAYS[way](ptx)
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
