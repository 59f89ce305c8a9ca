"""A Hopper GPU that is not there: calls are prepared and started as on one, by a driver that does
nothing.

Tensors lie in the CPU's memory; everything on the way to the driver runs as it does for a device:
validation, recognising mods, choice of kernels, their arguments in the layout of a compiled kernel.
Kernels are not compiled, results are whatever their memory held. The driver is a C function that
returns at once, called through ctypes like the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnloom.api import near, planning, repeats
from attnloom.backends.gluon import gate
from attnloom.backends.triton import beside, configs, direct, launcher
from attnloom.backends.triton.launch import TritonBackend
from attnloom.backends.triton.overlap import Config
from benchmarks.signatures import type_of

H200 = configs.Device(90, 232448, 132, 50 << 20)
_SIZES = {"fp32": 4, "i32": 4, "i64": 8}
_MAP_BYTES = 128
_DESCRIPTOR = {
    "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1], "fp4_padded": False,
}  # fmt: skip


@dataclass
class Launch:
    """What the driver was given: the kernel, its grid, the stream, and each parameter's bytes."""

    kernel: str
    grid: int
    stream: int
    parameters: list[bytes]


@dataclass(frozen=True)
class Compiled:
    """A kernel that was asked for. kinds: types of its arguments. aligned: whether Triton finds
    each pointer at a multiple of 16, by which it tells kernels apart too."""

    kernel: str
    config: Any
    kinds: tuple[Any, ...]
    aligned: tuple[bool, ...]


@dataclass
class Gpu:
    """The pretended device.

    started: launches, as long as `records` is set; reading parameters takes longer than a launch.
    kernels: names by handle. compiled: what was asked for, in order, repetitions too.
    sizes: bytes of each kernel's parameters. encoded: descriptors made.
    """

    records: bool = False
    started: list[Launch] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    encoded: int = 0
    stream: int = 0
    compiling: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, kernel: Any, *args: Any, **options: Any) -> SimpleNamespace:
        """As JITFunction.run with warmup=True, but for the kernel."""
        kinds = {name: type_of(a) for name, a in zip(kernel.arg_names, args, strict=True)}
        kinds[kernel.arg_names[-1]] = "constexpr"
        count = sum(_is_descriptor(kind) for kind in kinds.values())
        sizes = [n for k, a in zip(kinds.values(), args, strict=True) for n in _sizes_of(k, a)]
        aligned = tuple(p.data_ptr() % 16 == 0 for a in args for p in _pointers(a))
        asked = Compiled(kernel.__name__, args[-1], tuple(kinds.values()), aligned)
        with self.compiling:
            self.compiled.append(asked)
            self.kernels.append(kernel.__name__)
            self.sizes.append([*sizes, 8, 8])
            handle = len(self.kernels) - 1
        metadata = SimpleNamespace(
            shared=1024, num_warps=4, tensordesc_meta=[_DESCRIPTOR] * count,
            launch_pdl=options.get("launch_pdl", False),
        )  # fmt: skip
        return SimpleNamespace(
            metadata=metadata, src=SimpleNamespace(signature=kinds), hash=handle, name=handle,
            kernel=b"",
        )  # fmt: skip

    def load_binary(self, name: int, *_: Any) -> tuple[Any, int, int, int, int]:
        return None, name << 32, 64, 0, 1024

    def fill_tma_descriptor(self, address: int, *_: Any) -> bytes:
        self.encoded += 1
        return _PADDING + address.to_bytes(8, "little") + _REST

    def get_param_info(self, function: int, i: int, offset: Any, size: Any) -> int:
        sizes = self.sizes[function >> 32]
        if i >= len(sizes):
            return 1
        size._obj.value = sizes[i]
        return 0

    def record(
        self, place: ctypes.c_void_p, function: ctypes.c_void_p, values: ctypes.c_void_p, _: None
    ) -> int:
        """In place of cuLaunchKernelEx."""
        config = Config.from_address(place.value or 0)
        handle = (function.value or 0) >> 32
        sizes = self.sizes[handle]
        places = (ctypes.c_void_p * len(sizes)).from_address(values.value or 0)
        given = [ctypes.string_at(at, n) for at, n in zip(places, sizes, strict=True)]
        self.started.append(
            Launch(self.kernels[handle], config.sizes[0], config.stream or 0, given)
        )
        return 0


_PADDING = b" " * (_MAP_BYTES - bytes.__basicsize__ + 1)
_REST = b"m" * (_MAP_BYTES - 8)


def _is_descriptor(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _pointers(argument: Any) -> list[Any]:
    if isinstance(argument, tuple):
        return [p for a in argument for p in _pointers(a)]
    return [argument] if hasattr(argument, "data_ptr") else []


def _sizes_of(kind: Any, argument: Any) -> list[int]:
    if isinstance(kind, tuple):
        return [n for k, a in zip(kind, argument, strict=True) for n in _sizes_of(k, a)]
    if kind == "constexpr":
        return []
    if _is_descriptor(kind):
        rank = len(argument.shape)
        return [_MAP_BYTES, *[4] * rank, *[8] * rank]
    return [8 if kind.startswith("*") else _SIZES[kind]]


def _start_nothing() -> Callable[..., int]:
    """A C function that returns 0 for two addresses that differ, with cuLaunchKernelEx's
    arguments."""
    function = ctypes.CDLL(None).pthread_equal
    function.argtypes = [ctypes.c_void_p] * 4
    return function


@contextlib.contextmanager
def planned_for_it() -> Iterator[None]:
    """Inside, calls with CPU tensors are planned as an H200's, with nothing remembered before."""
    found = planning.candidates
    patches = [
        mock.patch.object(configs, "device_of", lambda _: H200),
        mock.patch.object(TritonBackend, "unsupported", lambda *_: None),
        mock.patch.object(gate, "_device", lambda _: None),
        mock.patch.object(gate, "_version", lambda: None),
        mock.patch.object(planning, "candidates", lambda options, *_: found(options, "cuda", True)),
        mock.patch.object(planning, "_plans", {}),
        mock.patch.object(repeats, "_buckets", {}),
        mock.patch.object(repeats, "_met", set()),
        mock.patch.object(near, "_calls", {}),
        *(mock.patch.dict(memory, clear=True) for memory in _memories()),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def hopper(records: bool = False) -> Iterator[Gpu]:
    """Inside, calls with CPU tensors go the way of an H200's.

    Args:
        records: keep what every launch was given.
    """
    gpu = Gpu(records)
    library = SimpleNamespace(
        cuLaunchKernelEx=gpu.record if records else _start_nothing(),
        cuFuncGetParamInfo=gpu.get_param_info,
    )
    utils = SimpleNamespace(
        load_binary=gpu.load_binary,
        fill_tma_descriptor=gpu.fill_tma_descriptor,
        get_device_properties=lambda _: {"max_shared_mem": H200.shared_bytes},
    )
    active = SimpleNamespace(
        utils=utils,
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    patches = [
        planned_for_it(),
        mock.patch.object(direct, "_cuda", lambda: library),
        mock.patch.object(direct, "_kernels", {}),
        mock.patch.object(direct, "driver", SimpleNamespace(active=active)),
        mock.patch.object(launcher, "driver", SimpleNamespace(active=active)),
        mock.patch.object(JITFunction, "run", lambda kernel, *a, **k: gpu.compile(kernel, *a, **k)),
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: gpu.stream, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(beside.wait_for_all)
        yield gpu


def _memories() -> list[dict[Any, Any]]:
    """What launches are remembered by, which holds no pretended launch afterwards."""
    from attnloom.backends.gluon import launch_forward as gluon_forward
    from attnloom.backends.gluon import launch_roles, launch_wide
    from attnloom.backends.gluon import ready_backward as gluon_backward
    from attnloom.backends.triton import (
        launch_around,
        launch_decode,
        launch_forward,
        launch_paged,
        ready_backward,
    )

    modules = (launch_forward, launch_decode, launch_paged, ready_backward)
    modules = (*modules, gluon_forward, gluon_backward, launch_roles, launch_wide)
    memories = [module._ready for module in modules]
    return [*memories, launch_around._statistics]
