"""Kernels that are compiled without LLVM's passes over their IR, for first calls that wait.

They are a sixth of the time to compile a Hopper forward, and ptxas, which follows, does their work
once more: nothing more is spilled, and results have the same bits (H200, Triton 3.6). Triton has no
option for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_here = threading.local()


@contextlib.contextmanager
def hastily(wanted: bool = True) -> Iterator[None]:
    """Inside, kernels that this thread compiles for NVIDIA go without, if wanted."""
    before = getattr(_here, "wanted", False)
    _here.wanted = wanted
    try:
        yield
    finally:
        _here.wanted = before


def _install() -> None:
    compiler = sys.modules.get("triton.backends.nvidia.compiler")  # if Triton came with it
    llvm: Any = getattr(compiler, "llvm", None)
    plain, none = getattr(llvm, "optimize_module", None), getattr(llvm, "OPTIMIZE_O0", None)
    if plain is None or none is None:
        return

    def optimize_module(module: Any, level: Any, *args: Any, **options: Any) -> Any:
        return plain(module, none if getattr(_here, "wanted", False) else level, *args, **options)

    llvm.optimize_module = optimize_module


_install()
