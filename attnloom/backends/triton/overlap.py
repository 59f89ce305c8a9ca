"""Start a kernel beside the one in front of it on its stream (programmatic dependent launch).

It starts when all programs of that kernel have said that it may, or are done, and itself waits for
their results (griddepcontrol in PTX). Graphs capture it.
"""

from __future__ import annotations

import ctypes
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


class OverlappingLaunch:
    """In place of cuLaunchKernel, for one kernel. Not to be called by two threads at once."""

    __slots__ = ("_config", "_place", "_start")

    def __init__(self, library: Any, sizes: Sequence[int]) -> None:
        attribute = _Attribute(id=_SERIALIZATION, value=1)
        self._config = Config(tuple(sizes), None, ctypes.pointer(attribute), 1)
        self._place = ctypes.c_void_p(ctypes.addressof(self._config))
        self._start = library.cuLaunchKernelEx

    def __call__(self, function: ctypes.c_void_p, *rest: Any) -> int:
        *_, stream, values, extra = rest
        self._config.stream = stream
        return self._start(self._place, function, values, extra)
