"""Start compiled kernels through the CUDA driver, without a launcher of Triton's.

Triton 3.6 compiles a C module for every signature of a kernel (0.3 s of the first call) and takes
every argument apart at every launch: each number, each pointer by a call of its own, each TMA
descriptor anew. Here the parameters of a launch stay in memory. Tuples that are the same object as
last time are not looked at, descriptors not encoded again at the same address.

The order of parameters is that of Triton's launchers: tuples flattened, constants left out, a
descriptor followed by its sizes and strides, then two scratch pointers. The driver's own account of
the kernel's parameters is compared with it, and Triton's launcher is used where they differ.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from attnloom.backends.triton.overlap import DriverCall

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAP_BYTES = 128  # of a CUtensorMap, and its alignment
_FORMATS = {"fp32": "f", "i32": "i", "i64": "q"}


@functools.cache
def _cuda() -> ctypes.CDLL | None:
    """The CUDA driver, with what is called here declared; None if it lacks any of it."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
        library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, size, size]
    except (OSError, AttributeError):
        return None
    return library


def _unplaced(*_: object) -> None:
    raise AssertionError("a part without a place was written")


@dataclass(slots=True)
class Part:
    """An argument of a kernel that is not a plain pointer: where its values lie.

    at: its place among the arguments. is_tuple: else a number or a descriptor (map_at >= 0).
    pointers, numbers: indices in a tuple. last: the argument, or the address, as of now.
    """

    at: int
    is_tuple: bool = False
    pointers: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    formats: str = ""
    pointer_at: int = 0
    number_at: int = 0
    map_at: int = -1
    encoding: tuple[Any, ...] = ()
    last: Any = None
    write_pointers: Callable[..., None] = _unplaced
    write_numbers: Callable[..., None] = _unplaced


@dataclass(slots=True)
class Layout:
    """Sizes and places of the parameters in the kernel's order, and the bytes reserved so far.

    plain: which arguments are single pointers; they lie side by side from plain_at on, and those
        in tuples behind them.
    """

    sizes: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    room: int = 0
    parts: list[Part] = field(default_factory=list)
    plain: tuple[int, ...] = ()
    plain_at: int = 0
    next_pointer: int = 0
    scratch_at: int = 0

    def reserve(self, size: int, align: int) -> int:
        at = -(-self.room // align) * align
        self.room = at + size
        return at

    def declare(self, size: int, place: int) -> None:
        """The kernel's next parameter lies there."""
        self.sizes.append(size)
        self.places.append(place)


Writer = Callable[..., None]


class Room:
    """Memory for the parameters of one launch, and pointers to each of them."""

    __slots__ = ("_bytes", "_owner", "_values", "address", "values")

    def __init__(self, layout: Layout) -> None:
        self._owner = ctypes.create_string_buffer(layout.room + _MAP_BYTES)
        base = ctypes.addressof(self._owner)
        base += -base % _MAP_BYTES
        self.address = base
        self._bytes = (ctypes.c_char * layout.room).from_address(base)
        self._values = (ctypes.c_void_p * len(layout.places))(*(base + at for at in layout.places))
        self.values = ctypes.c_void_p(ctypes.addressof(self._values))
        self.writer("QQ", layout.scratch_at)(0, 0)

    def writer(self, formats: str, at: int) -> Writer:
        return functools.partial(struct.Struct("=" + formats).pack_into, self._bytes, at)

    def encode(self, part: Part, place: int) -> object:
        """Write a TMA descriptor of a tensor there; what it was copied from."""
        encoded = driver.active.utils.fill_tma_descriptor(place, *part.encoding)
        self.copy(encoded, part)
        return encoded

    def copy(self, encoded: object, part: Part) -> None:
        # PyCUtensorMapObject: a head, then the map at the next multiple of 128
        ctypes.memmove(self.address + part.map_at, id(encoded) + _MAP_BYTES, _MAP_BYTES)


class Start:
    """The driver's call for one kernel."""

    __slots__ = ("_launch", "_module", "_room")

    def __init__(self, loaded: Loaded, grid: int, room: Room) -> None:
        library = _cuda()
        assert library is not None
        self._module, self._room = loaded.module, room
        sizes = (grid, 1, 1, 32 * loaded.num_warps, 1, 1, loaded.shared)
        self._launch = DriverCall(library, loaded.function, sizes, room.values, loaded.overlaps)

    def __call__(self, stream: int) -> None:
        status = self._launch(stream)
        if status == _NO_CONTEXT:  # a thread that has not used the device yet
            torch.cuda.current_stream().query()
            status = self._launch(stream)
        if status:
            raise RuntimeError(f"the CUDA driver refused to start a kernel (error {status})")


class Direct:
    """Starts one compiled kernel with arguments of the types that it was compiled for."""

    __slots__ = (
        "_lock", "_maps", "_others", "_plain", "_room", "_start", "_write_plain", "grid", "loaded",
    )  # fmt: skip

    def __init__(self, loaded: Loaded, grid: int, args: tuple[object, ...]) -> None:
        self.loaded, self.grid = loaded, grid
        layout = laid_out(loaded, args)
        self._room = Room(layout)
        prepare_parts(layout, loaded, self._room, args)
        self._plain = layout.plain
        self._write_plain = self._room.writer("Q" * len(layout.plain), layout.plain_at)
        self._start = Start(loaded, grid, self._room)
        self._lock = threading.Lock()
        self._maps = [part for part in layout.parts if part.map_at >= 0]
        self._others = [part for part in layout.parts if part.map_at < 0]

    @property
    def spills(self) -> int:
        return self.loaded.spills

    def __call__(self, stream: int, args: tuple[Any, ...]) -> None:
        with self._lock:  # the driver has copied the parameters when it returns
            self._write_plain(*[args[i].data_ptr() for i in self._plain])
            for part in self._maps:
                arg = args[part.at]
                place = (arg if isinstance(arg, torch.Tensor) else arg.base).data_ptr()
                if place != part.last:
                    self._room.encode(part, place)
                    part.last = place
            for part in self._others:
                arg = args[part.at]
                if arg is not part.last:
                    _write(part, arg)
            self._start(stream)


def prepare_parts(layout: Layout, loaded: Loaded, room: Room, args: tuple[object, ...]) -> None:
    """Give parts their writers, and descriptors what does not depend on their address."""
    for part in layout.parts:
        part.write_pointers = room.writer("Q" * len(part.pointers), part.pointer_at)
        part.write_numbers = room.writer(part.formats, part.number_at)
    maps = [part for part in layout.parts if part.map_at >= 0]
    for part, made in zip(maps, loaded.maps, strict=True):
        described: Any = args[part.at]
        part.write_numbers(*described.shape, *described.strides)
        part.encoding = _encoding(made, described)


def _encoding(made: dict[str, Any], described: Any) -> tuple[Any, ...]:
    """What Triton's driver encodes a descriptor from, but for its address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    element = TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]]
    form = made["swizzle"], made["elem_size"], element, made["block_size"]
    return *form, described.shape, described.strides, 0


def _write(part: Part, arg: Any) -> None:
    """A tuple, or a number."""
    if not part.is_tuple:
        part.write_numbers(arg)
        part.last = arg
        return
    if part.numbers:
        part.write_numbers(*[arg[i] for i in part.numbers])
    if part.pointers:
        part.write_pointers(*[arg[i].data_ptr() for i in part.pointers])
    else:  # a tuple that holds tensors would keep their memory
        part.last = arg


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel on a device. kinds: types of its arguments, "constexpr" left out at the end.
    overlaps: it starts beside the kernel in front of it."""

    module: Any
    function: int
    spills: int
    num_warps: int
    shared: int
    kinds: tuple[Any, ...]
    maps: tuple[dict[str, Any], ...]
    overlaps: bool = False


class _UnknownLayoutError(Exception):
    """An argument is of a type that is not written here."""


def direct(compiled: Any, grid: int, args: tuple[object, ...]) -> Direct | None:
    """A direct launch of a compiled kernel; None where Triton's launcher has to do it.

    Raises:
        OutOfResources: the device has too little shared memory or too few registers.
    """
    meta = compiled.metadata
    extras = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size", "tmem_size")
    target = driver.active.get_current_target()
    if target.backend != "cuda" or _cuda() is None or getattr(meta, "num_ctas", 1) != 1:
        return None
    if any(getattr(meta, name, None) for name in extras):
        return None
    *kinds, last = compiled.src.signature.values()
    maps = tuple(getattr(meta, "tensordesc_meta", None) or ())
    described = sum(isinstance(k, str) and k.startswith("tensordesc") for k in kinds)
    if last != "constexpr" or described != len(maps):
        return None
    if any(m is None or m["fp4_padded"] for m in maps):
        return None
    utils, device = driver.active.utils, driver.active.get_current_device()
    if not hasattr(utils, "fill_tma_descriptor"):
        return None
    most = utils.get_device_properties(device)["max_shared_mem"]
    if meta.shared > most:
        raise OutOfResources(meta.shared, most, "shared memory")
    key = (compiled.hash, device)
    loaded = _kernels.get(key)
    if loaded is None:
        module, function, _, spills, threads = utils.load_binary(
            compiled.name, compiled.kernel, meta.shared, device
        )
        if 32 * meta.num_warps > threads:
            raise OutOfResources(32 * meta.num_warps, threads, "threads")
        overlaps = bool(getattr(meta, "launch_pdl", False))
        loaded = Loaded(
            module, function, spills, meta.num_warps, meta.shared, tuple(kinds), maps, overlaps
        )
        if not _is_known(loaded, args):
            return None
        _kernels[key] = loaded
    return Direct(loaded, grid, args)


_kernels: dict[tuple[str, int], Loaded] = {}


def _is_known(loaded: Loaded, args: tuple[object, ...]) -> bool:
    """Whether the kernel's parameters, by the driver's account, are those written here."""
    library = _cuda()
    assert library is not None
    try:
        sizes = laid_out(loaded, args).sizes
    except _UnknownLayoutError:
        return False
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i in range(len(sizes) + 1):
        status = library.cuFuncGetParamInfo(
            loaded.function, i, ctypes.byref(offset), ctypes.byref(size)
        )
        is_last = i == len(sizes)
        if bool(status) != is_last or (not is_last and size.value != sizes[i]):
            return False
    return True


def laid_out(loaded: Loaded, args: tuple[object, ...]) -> Layout:
    """Places of all parameters, the two scratch pointers last."""
    layout = Layout()
    layout.plain = tuple(i for i, kind in enumerate(loaded.kinds) if _is_pointer(kind))
    in_tuples = sum(_is_pointer(k) for kind in loaded.kinds if type(kind) is tuple for k in kind)
    place = layout.plain_at = layout.reserve(8 * (len(layout.plain) + in_tuples), 8)
    layout.next_pointer = place + 8 * len(layout.plain)
    for i, (kind, arg) in enumerate(zip(loaded.kinds, args, strict=True)):
        if _is_pointer(kind):
            layout.declare(8, place)
            place += 8
        elif kind != "constexpr":
            layout.parts.append(_part(layout, i, kind, arg))
    layout.scratch_at = layout.reserve(16, 8)
    layout.declare(8, layout.scratch_at)
    layout.declare(8, layout.scratch_at + 8)
    return layout


def _is_pointer(kind: Any) -> bool:
    return isinstance(kind, str) and kind[0] == "*"


def _part(layout: Layout, at: int, kind: Any, arg: Any) -> Part:
    if isinstance(kind, tuple):
        pointers = tuple(i for i, k in enumerate(kind) if _is_pointer(k))
        numbers = tuple(i for i, k in enumerate(kind) if k in _FORMATS)
        if len(pointers) + len(numbers) != len(kind):
            raise _UnknownLayoutError
        return _placed(layout, Part(at, True, pointers, numbers), kind)
    if kind.startswith("tensordesc"):
        return _described(layout, at, arg)
    if kind in _FORMATS:
        return _placed(layout, Part(at, numbers=(0,)), (kind,))
    raise _UnknownLayoutError


def _placed(layout: Layout, part: Part, kinds: tuple[str, ...]) -> Part:
    """Places for an argument's values: pointers side by side, and numbers."""
    part.formats = "".join(_FORMATS[kinds[i]] for i in part.numbers)
    part.pointer_at = layout.next_pointer
    layout.next_pointer += 8 * len(part.pointers)
    part.number_at = layout.reserve(struct.calcsize("=" + part.formats), 8)
    pointer, number = part.pointer_at, part.number_at
    for kind in kinds:
        if _is_pointer(kind):
            layout.declare(8, pointer)
            pointer += 8
        else:
            size = struct.calcsize("=" + _FORMATS[kind])
            layout.declare(size, number)
            number += size
    return part


def _described(layout: Layout, at: int, arg: Any) -> Part:
    """Places for a TMA descriptor, its sizes (32 bits) and its strides (64 bits)."""
    rank = len(arg.shape)
    part = Part(at, formats="i" * rank + "q" * rank)
    part.map_at = layout.reserve(_MAP_BYTES, _MAP_BYTES)
    layout.declare(_MAP_BYTES, part.map_at)
    part.number_at = layout.reserve(12 * rank, 8)
    for i in range(rank):
        layout.declare(4, part.number_at + 4 * i)
    for i in range(rank):
        layout.declare(8, part.number_at + 4 * rank + 8 * i)
    return part
