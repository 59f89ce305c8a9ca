"""Copies of what a launch reads once say that the second-level cache may give it up first.

A cache that holds a part of what passes keeps what other programs read again: partial results,
queries, pages' numbers. Triton 3.6 lets loads into registers say so (`eviction_policy`), but not
the copies into shared memory that a pipelined loop is made of; so it is written into the PTX.
It is a hint: results are the same, and a copy in a form that is not known here goes without.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from attnloom.backends.triton import configs
from attnloom.backends.triton.interpreter import INTERPRETED

_POLICY, _NOTHING = "%read_once", "%nothing"
# By TMA, and 16 bytes a lane: so come keys and values; entries of lists do not.
_TILES = (
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::c\w+\.global\.mbarrier::complete_tx::bytes)"
    r"( \[[^;]*\]);",
    rf"\1.L2::cache_hint\2, {_POLICY};",
)
# Where a part of the address in shared memory is the same in all lanes, ptxas 12.8 and 12.9 give a
# copy with a hint uniform registers that nobody has written: an illegal instruction on an H200.
# `_NOTHING` is zero, which ptxas does not know, in each lane.
_ROWS = (
    r"(cp\.async\.cg\.shared\.global)( \[ *)(%r\d+)([^;]*);",
    rf"{{ .reg .b32 %at; add.s32 %at, \3, {_NOTHING};"
    rf" \1.L2::cache_hint\2%at\4, {_POLICY}; }}",
)
_ENTRY = r"(\.entry\b[^{]*\{)"
_DECLARED = (
    rf"\1\n.reg .b64 {_POLICY};\n.reg .b32 {_NOTHING};"
    rf"\ncreatepolicy.fractional.L2::evict_first.b64 {_POLICY}, 1.0;"
    rf"\nmov.u32 {_NOTHING}, %lanemask_lt;\nshr.u32 {_NOTHING}, {_NOTHING}, 31;"
)
# A part of the configuration, so that kernels on disk are found by what was written into them.
HINT = hashlib.sha256(repr((_TILES, _ROWS, _ENTRY, _DECLARED)).encode()).hexdigest()[:8]

_here = threading.local()


def hint_for(where: torch.device, num_readers: int, num_bytes: int) -> str:
    """HINT where each key is copied by one program and all are more than the cache keeps, "" else.

    Args:
        num_readers: programs that read the same keys.
        num_bytes: of all keys and values that a launch may read.
    """
    device = configs.device_of(where)
    large = num_bytes > device.l2_bytes
    return HINT if device.has_tma and num_readers == 1 and large and not INTERPRETED else ""


@contextlib.contextmanager
def compiled_with(hint: str) -> Iterator[None]:
    """Inside, kernels that this thread compiles for NVIDIA have the hint, if there is one."""
    before = getattr(_here, "hint", "")
    _here.hint = hint
    try:
        yield
    finally:
        _here.hint = before


def mark(ptx: str) -> str:
    """A kernel whose copies have the hint."""
    marked = re.sub(*_ROWS, re.sub(*_TILES, ptx))
    return ptx if marked == ptx else re.sub(_ENTRY, _DECLARED, marked, count=1)


def _install() -> None:
    compiler = sys.modules.get("triton.backends.nvidia.compiler")  # if Triton came with it
    backend = getattr(compiler, "CUDABackend", None)
    plain = getattr(backend, "make_ptx", None)
    if plain is None:
        return

    def make_ptx(self: Any, *args: Any, **options: Any) -> Any:
        text = plain(self, *args, **options)
        return mark(text) if getattr(_here, "hint", "") else text

    backend.make_ptx = make_ptx  # type: ignore[union-attr]


_install()
