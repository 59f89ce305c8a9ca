"""Compile Triton kernels for GPUs that are not there, and read what the compilers say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from attnloom.backends.triton import configs
from attnloom.backends.triton.launcher import OPTIONS

# name -> (target, shared memory a block may use, device as configs.py sees it)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), configs.Device(80, 166912, 108, 40 << 20)),
    "sm_86": (GPUTarget("cuda", 86, 32), configs.Device(86, 101376, 84, 6 << 20)),
    "sm_90": (GPUTarget("cuda", 90, 32), configs.Device(90, 232448, 132, 50 << 20)),
    "sm_100": (GPUTarget("cuda", 100, 32), configs.Device(100, 232448, 148, 126 << 20)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), configs.Device(0, 65536, 304, 4 << 20)),
}
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Compiled:
    """shared: bytes a block. registers, spills (bytes): by ptxas; None off NVIDIA."""

    shared: int
    registers: int | None
    spills: int | None
    text: str


def type_of(argument: Any) -> Any:
    """Triton's signature of an argument as a launcher passes it."""
    if isinstance(argument, tuple):
        return tuple(type_of(a) for a in argument)
    if isinstance(argument, TensorDescriptor):
        shape = ",".join(map(str, argument.block_shape))
        return f"tensordesc<{_TYPES[argument.base.dtype]}[{shape}]>"
    if isinstance(argument, torch.Tensor):
        return "*" + _TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


@contextmanager
def device_is(name: str) -> Iterator[None]:
    """Inside, launchers configure kernels for this device."""
    with mock.patch.object(configs, "device_of", lambda _: TARGETS[name][1]):
        yield


def compile_for(name: str, kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]):
    """Compile a kernel for a target; arguments are those of a launch, the last one its config.

    16-byte alignment of every address is assumed, as launches find it.
    """
    target, _ = TARGETS[name]
    names = kernel.arg_names
    signature = {n: type_of(a) for n, a in zip(names, arguments, strict=True)}
    signature[names[-1]] = "constexpr"
    attrs = {path: [["tt.divisibility", 16]] for path in _pointers(arguments)}
    source = ASTSource(kernel, signature, {(len(names) - 1,): arguments[-1]}, attrs)
    compiled = triton.compile(source, target=target, options=OPTIONS | options)
    shared = compiled.metadata.shared
    if target.backend != "cuda":
        return Compiled(shared, None, None, compiled.asm["amdgcn"])
    return Compiled(shared, *_assemble(compiled.asm["ptx"]), compiled.asm["ptx"])


def _pointers(arguments: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for i, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            yield from _pointers(argument, (*path, i))
        elif isinstance(argument, torch.Tensor):
            yield (*path, i)


def _assemble(ptx: str) -> tuple[int, int]:
    """Registers a thread and bytes of spill stores, as ptxas reports them."""
    match = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert match is not None
    tool = get_ptxas(int(match[2])).path
    done = subprocess.run(
        [tool, "-v", f"-arch={match[1]}", "-", "-o", "/dev/null"],
        input=ptx, capture_output=True, text=True, check=True,
    )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert registers is not None and spills is not None, done.stderr
    return int(registers[1]), int(spills[1])
