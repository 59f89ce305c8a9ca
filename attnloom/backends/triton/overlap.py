"""The driver's call for one kernel, which may start beside the one in front of it on its stream
(programmatic dependent launch).

Such a kernel starts when all programs of the one in front have said that it may, or are done, and
itself waits for their results (griddepcontrol in PTX). Graphs capture it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes of which an int is used."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("gap", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig. sizes: of the grid and of a block, and bytes of shared memory."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DriverCall:
    """cuLaunchKernelEx for one kernel: four arguments, converted once, where cuLaunchKernel takes
    eleven (0.25 us for 0.7). Not to be called by two threads at once."""

    __slots__ = ("_config", "_start", "_stream")

    def __init__(
        self, library: Any, function: int, sizes: Sequence[int], values: Any, overlaps: bool
    ) -> None:
        attribute = _Attribute(id=_SERIALIZATION, value=1)
        self._stream = 0
        self._config = Config(tuple(sizes), None, ctypes.pointer(attribute), int(overlaps))
        place = ctypes.c_void_p(ctypes.addressof(self._config))
        self._start = functools.partial(
            library.cuLaunchKernelEx, place, ctypes.c_void_p(function), values, None
        )

    def __call__(self, stream: int) -> int:
        """Start on a stream; the driver's status."""
        if stream != self._stream:
            self._config.stream = self._stream = stream
        return self._start()
