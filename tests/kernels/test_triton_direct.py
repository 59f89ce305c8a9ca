"""Direct launches without a device: parameters as the compiled kernel declares them, in memory."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from attnloom.backends.triton import (
    direct,
    launch_around,
    launch_backward,
    launch_forward,
    launcher,
    ready_backward,
)
from attnloom.backends.triton.launch import TritonBackend
from attnloom.backends.triton.overlap import Config, DriverCall
from benchmarks.signatures import type_of
from tests.kernels.cross_compile import compile_for, device_is
from tests.kernels.test_triton_compile import causal, make_call

_BYTES = {"u64": 8, "b64": 8, "s64": 8, "f32": 4, "u32": 4, "b32": 4}
_MADE = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1], "fp4_padded": False}


def declared(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in a text."""
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^\[\n]*?(?:\[(\d+)\])?,?\n", ptx)
    return [int(length) if length else _BYTES[kind] for kind, length in found]


class Driver:
    """In place of libcuda: knows one kernel's parameters, and keeps what a launch was given."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.given: list[bytes] = []
        self.shape: tuple[int, ...] = ()
        self.encoded: list[int] = []

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        if i >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[i]
        return 0

    def cuLaunchKernelEx(self, place: Any, function: Any, values: Any, extra: Any) -> int:
        self.shape = tuple(Config.from_address(place.value).sizes)
        places = (ctypes.c_void_p * len(self.sizes)).from_address(values.value)
        self.given = [
            ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)
        ]
        return 0

    def encode(self, address: int, *rest: Any) -> bytes:
        """A descriptor that begins with its address, 128 bytes into an object as Triton's are."""
        self.encoded.append(address)
        padding = b" " * (128 - bytes.__basicsize__ + 1)
        return padding + struct.pack("=Q", address) + b"m" * 120


def expected(kind: Any, arg: Any) -> list[bytes]:
    """An argument as the kernel reads it."""
    if isinstance(kind, tuple):
        return [b for k, a in zip(kind, arg, strict=True) for b in expected(k, a)]
    if isinstance(arg, TensorDescriptor):
        sizes = [struct.pack("=i", n) for n in arg.shape]
        shown = struct.pack("=Q", arg.base.data_ptr()) + b"m" * 120
        return [shown, *sizes, *(struct.pack("=q", n) for n in arg.strides)]
    if isinstance(arg, torch.Tensor):
        return [struct.pack("=Q", arg.data_ptr())]
    return [struct.pack("=f" if kind == "fp32" else "=i", arg)]


class Checker:
    """In place of launcher.Launcher: compiles, starts directly, and compares."""

    checked: list[str] = []
    takes_tensors = False

    def __init__(
        self, kernel: Any, config: Any, grid: int, options: dict[str, int], operands: int = 0
    ) -> None:
        self.kernel, self.config, self.grid, self.options = kernel, config, grid, options
        self.spills = 0

    def __call__(self, aligned: bool, *args: Any) -> None:
        made = compile_for("sm_90", self.kernel, (*args, self.config), self.options)
        library = Driver(declared(made.text))
        kinds = tuple(type_of(a) for a in args)
        descriptors = [a for a in args if isinstance(a, TensorDescriptor)]
        loaded = direct.Loaded(
            None, 7, 0, self.options["num_warps"], made.shared, kinds, (_MADE,) * len(descriptors)
        )
        utils = SimpleNamespace(fill_tma_descriptor=library.encode)
        active = SimpleNamespace(active=SimpleNamespace(utils=utils))
        with (
            mock.patch.object(direct, "_cuda", lambda: library),
            mock.patch.object(direct, "driver", active),
        ):
            assert direct._is_known(loaded, args)
            launch = direct.Direct(loaded, self.grid, args)
            self._check(launch, library, kinds, args)
        self.checked.append(self.kernel.__name__)

    def _check(self, launch: Any, library: Driver, kinds: Any, args: tuple[Any, ...]) -> None:
        bases = [a.base for a in args if isinstance(a, TensorDescriptor)]
        wanted = [b for k, a in zip(kinds, args, strict=True) for b in expected(k, a)]
        for _ in range(2):  # the second time few arguments are looked at
            launch(0, args)
            assert library.given == [*wanted, b"\0" * 8, b"\0" * 8]
        sizes = (self.grid, 1, 1, 32 * self.options["num_warps"], 1, 1)
        assert library.shape[:-1] == sizes
        assert library.encoded == [base.data_ptr() for base in bases]
        self._elsewhere(launch, library, kinds, args)

    def _elsewhere(self, launch: Any, library: Driver, kinds: Any, args: tuple[Any, ...]) -> None:
        """Other tensors and numbers of the same types."""

        def moved(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return tuple(moved(a) for a in arg)
            if isinstance(arg, TensorDescriptor):
                base = torch.empty_like(arg.base)
                return TensorDescriptor(base, arg.shape, arg.strides, arg.block_shape)
            return torch.empty_like(arg) if isinstance(arg, torch.Tensor) else arg + 1

        first = library.given
        others = tuple(moved(a) for a in args)
        launch(0, others)
        wanted = [b for k, a in zip(kinds, others, strict=True) for b in expected(k, a)]
        assert library.given[:-2] == wanted
        back = tuple(a.base if isinstance(a, TensorDescriptor) else a for a in args)
        launch(0, back)  # tensors in place of descriptors
        assert library.given == first


def test_parameters_are_those_that_the_kernels_declare() -> None:
    """Forward and backward with a mask, a learned capture and two TMA descriptors a tensor."""
    slope = torch.ones(32, requires_grad=True)
    call = make_call(
        96, score_mod=lambda s, b, h, q, kv: s + slope[h] * (kv - q), mask_mod=causal,
        q_len=256, kv_len=256,
    )  # fmt: skip
    Checker.checked = []
    ready = (launch_forward._ready, ready_backward._ready, launch_around._statistics)
    for memory in ready:
        memory.clear()
    with (
        device_is("sm_90"),
        mock.patch.object(launch_forward, "Launcher", Checker),
        mock.patch.object(launch_around, "Launcher", Checker),
        mock.patch.object(ready_backward, "Launcher", Checker),
    ):
        result = TritonBackend().forward(call, want_max_scores=False)
        dout = torch.empty_like(result.out)
        launch_backward.backward(call, result.out, result.lse, dout, None)
    for memory in ready:
        memory.clear()
    assert Checker.checked == ["forward_kernel", "delta_kernel", "row_kernel", "key_kernel"]


def test_a_kernel_with_other_parameters_is_left_to_triton() -> None:
    loaded = direct.Loaded(None, 7, 0, 4, 0, ("*fp32", "fp32"), ())
    library = Driver([8, 8, 8, 8])
    with mock.patch.object(direct, "_cuda", lambda: library):
        assert not direct._is_known(loaded, (torch.zeros(1), 1.0))
        library.sizes = [8, 4, 8, 8]
        assert direct._is_known(loaded, (torch.zeros(1), 1.0))
        library.sizes = [8, 4, 8]
        assert not direct._is_known(loaded, (torch.zeros(1), 1.0))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_kernel_that_overlaps_is_started_with_the_attribute_that_says_so(overlaps: bool) -> None:
    """CUlaunchConfig as the driver reads it: seven sizes, the stream, attributes."""
    seen: list[object] = []

    def start(config: Any, function: Any, values: Any, extra: Any) -> int:
        words = ctypes.string_at(config.value, 56)
        *sizes, stream, attributes, count = struct.unpack_from("=7I4xQQI", words)
        seen.append((sizes, stream, count, function.value, values, extra))
        if count:
            seen.append(struct.unpack("=IIi", ctypes.string_at(attributes, 12)))
        return 3

    library = SimpleNamespace(cuLaunchKernelEx=start)
    sizes = (33, 1, 1, 128, 1, 1, 2048)
    launch = DriverCall(library, 7, sizes, "values", overlaps)
    streams = (1 << 40, 0, 1 << 40, 1 << 40)
    assert [launch(stream) for stream in streams] == [3] * 4
    programmatic_stream_serialization = (6, 0, 1)
    wanted: list[object] = []
    for stream in streams:
        wanted.append((list(sizes), stream, int(overlaps), 7, "values", None))
        if overlaps:
            wanted.append(programmatic_stream_serialization)
    assert seen == wanted


def test_a_launcher_starts_directly_what_it_was_compiled_for() -> None:
    """Unaligned arguments get a kernel of their own, and so does another device."""
    told: list[object] = []
    device = [0]

    class Kernel:
        def run(self, *args: object, **options: object) -> str:
            told.append(("compiled", options["enable_fp_fusion"]))
            return "compiled"

    class Started:
        spills = 5

        def __call__(self, stream: int, args: tuple[object, ...]) -> None:
            told.append((stream, args))

    current = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: device[0]))
    with (
        mock.patch.object(launcher, "direct", lambda *_: Started()),
        mock.patch.object(launcher, "driver", current),
        mock.patch.object(launcher, "stream_of", lambda n: 100 + n),
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: device[0], create=True),
    ):
        launch = launcher.Launcher(Kernel(), Any, 4, {"num_warps": 4})
        assert not launch.takes_tensors
        for aligned in (True, True, False):
            launch(aligned, 1)
        assert launch.takes_tensors
        device[0] = 1
        assert not launch.takes_tensors
        launch(True, 1)
    assert told == [
        ("compiled", True), (100, (1,)), (100, (1,)), ("compiled", True), (100, (1,)),
        ("compiled", True), (101, (1,)),
    ]  # fmt: skip
    assert launch.spills == 5


def test_nothing_is_assumed_of_addresses_that_are_not_aligned() -> None:
    """Kernels are compiled, and started by Triton's launcher, without a look at addresses."""
    told: list[object] = []

    class Kernel:
        def run(self, *args: Any, **_: object) -> SimpleNamespace:
            told.append([a.data_ptr() % 16 for a in args[:3]])
            return SimpleNamespace(
                n_spills=3, launch_metadata=lambda *_: None, function=7, packed_metadata=(),
                run=lambda *given: told.append(given[-3]),
            )  # fmt: skip

    @dataclasses.dataclass
    class Config:
        ALIGNED: bool

    tensor = torch.zeros(16)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    with (
        mock.patch.object(launcher, "direct", lambda *_: None),
        mock.patch.object(launcher, "driver", SimpleNamespace(active=active)),
    ):
        launch = launcher.Launcher(Kernel(), Config(ALIGNED=False), 4, {"num_warps": 4}, 2)
        launch(True, tensor, tensor, tensor)
    assert told == [[1, 1, 0], tensor]
    assert launch.spills == 3
