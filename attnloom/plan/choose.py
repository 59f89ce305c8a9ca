"""Which backends may run a problem, in order of preference."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

from attnloom.errors import UnsupportedError
from attnloom.plan.problem import KernelOptions

NO_COMPILER = (
    "attnloom found no C++ compiler, so attention on the CPU runs as tiled torch operators, "
    "several times slower than compiled kernels. Install g++ or clang (or set CXX), or run "
    "'pip install ziglang', which carries one."
)
NO_FUSED_KERNEL = (
    "attnloom has no fused kernel for {device} here ({why}), so attention runs as tiled torch "
    "operators: memory stays linear in the sequence length, speed is far below a fused kernel's."
)
BUILT = ("auto", "cpu", "gluon", "triton", "tiled", "reference")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to try.

    warning: shown once a process when it is the one that runs.
    special: for few devices, so that passing over it is worth a line of the log and no warning.
    """

    backend: str
    warning: str | None = None
    special: bool = False


def candidates(
    options: KernelOptions, device_type: str, has_compiler: bool
) -> tuple[Candidate, ...]:
    """Backends for a device, best first.

    Args:
        has_compiler: a C++ compiler was found; looked at only for CPU problems under "auto".
    Returns:
        at least one candidate; exactly one when the caller chose the backend.
    Raises:
        UnsupportedError: the chosen backend is for another kind of device.
    """
    chosen = options.backend
    if chosen == "cpu" and device_type != "cpu":
        raise UnsupportedError(
            f"backend 'cpu' runs on CPU tensors; query is on a {device_type} device. "
            "Use backend='tiled', or 'auto' to let attnloom choose."
        )
    if chosen in ("triton", "gluon") and not _has_triton():
        raise UnsupportedError(
            f"backend '{chosen}' needs the package triton, which is not installed here. Run "
            "'pip install triton' (Linux), or use backend='auto' to let attnloom choose."
        )
    if chosen != "auto":
        return (Candidate(chosen),)
    if device_type == "meta":
        return (Candidate("tiled"),)  # shapes only: nothing is run
    if device_type == "cuda" and _has_triton():
        return (Candidate("gluon", special=True), Candidate("triton"), Candidate("tiled"))
    if device_type != "cpu":
        why = "triton is not installed" if device_type == "cuda" else "it has CUDA and CPU kernels"
        return (Candidate("tiled", NO_FUSED_KERNEL.format(device=device_type, why=why)),)
    if not has_compiler:
        return (Candidate("tiled", NO_COMPILER),)
    return (Candidate("cpu"), Candidate("tiled"))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
