"""A warning where other processes compute on the same GPU.

Kernels that are interrupted in favour of another process were seen to lose tiles (docs/log.md,
2026-11-30). The driver's management library counts the processes; without it nothing is said. It is
asked in a thread, since its start would be part of a process's first call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading

import torch

THREAD = "attnloom looks for neighbours"
_log = logging.getLogger("attnloom")
_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _TOO_FEW_PLACES = 0, 7


@functools.cache
def warn_of_neighbours(device: torch.device) -> None:
    """Say once that a device is shared, the first time that it is used."""
    threading.Thread(target=_look, args=(device, _uuid_of(device)), name=THREAD).start()


def _look(device: torch.device, uuid: str) -> None:
    count = num_processes(uuid)
    if count is not None and count > 1:
        _log.warning(
            "%d processes compute on %s. Where they take turns, Hopper kernels that are "
            "interrupted were seen to lose tiles: leave the GPU to one process, or pass "
            "kernel_options={'backend': 'triton'}.",
            count,
            device,
        )


def _uuid_of(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def num_processes(uuid: str) -> int | None:
    """Processes with a compute context on a GPU, this one among them; None where nobody can tell.
    Clients of MPS, whose kernels do not take turns, are not counted."""
    library = _library()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    count = ctypes.c_uint(0)  # places in a list of none: the library answers how many it needs
    status = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), None)
    return count.value if status in (_SUCCESS, _TOO_FEW_PLACES) else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        started = library.nvmlInit_v2()
        library.nvmlDeviceGetComputeRunningProcesses_v3  # noqa: B018 - AttributeError: an old one
    except (OSError, AttributeError):
        return None
    return library if started == _SUCCESS else None
