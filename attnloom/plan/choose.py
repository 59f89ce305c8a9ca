"""Which backends may run a problem, in order of preference."""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.errors import UnsupportedError
from attnloom.plan.problem import KernelOptions

NO_COMPILER = (
    "attnloom found no C++ compiler, so attention on the CPU runs as tiled torch operators, "
    "several times slower than compiled kernels. Install g++ or clang (or set CXX), or run "
    "'pip install ziglang', which carries one."
)
NO_TRITON_BACKEND = (
    "attnloom has no Triton backend yet, so attention on {device} runs as tiled torch operators: "
    "memory stays linear in the sequence length, speed is far below a fused kernel's."
)
BUILT = ("auto", "cpu", "tiled", "reference")
PLANNED = ("triton", "gluon")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to try. `warning` is shown once a process when it is the one that runs."""

    backend: str
    warning: str | None = None


def candidates(
    options: KernelOptions, device_type: str, has_compiler: bool
) -> tuple[Candidate, ...]:
    """Backends for a device, best first.

    Args:
        has_compiler: a C++ compiler was found; looked at only for CPU problems under "auto".
    Returns:
        at least one candidate; exactly one when the caller chose the backend.
    Raises:
        UnsupportedError: the chosen backend is not built, or is for another kind of device.
    """
    chosen = options.backend
    if chosen in PLANNED:
        raise UnsupportedError(
            f"backend '{chosen}' is not built yet. Use one of "
            f"{', '.join(repr(b) for b in BUILT)}; 'auto' lets attnloom choose."
        )
    if chosen == "cpu" and device_type != "cpu":
        raise UnsupportedError(
            f"backend 'cpu' runs on CPU tensors; query is on a {device_type} device. "
            "Use backend='tiled', or 'auto' to let attnloom choose."
        )
    if chosen != "auto":
        return (Candidate(chosen),)
    if device_type == "meta":
        return (Candidate("tiled"),)  # shapes only: nothing is run
    if device_type != "cpu":
        return (Candidate("tiled", NO_TRITON_BACKEND.format(device=device_type)),)
    if not has_compiler:
        return (Candidate("tiled", NO_COMPILER),)
    return (Candidate("cpu"), Candidate("tiled"))
