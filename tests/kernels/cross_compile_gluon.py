"""Compile Gluon kernels for a Hopper GPU that is not there, and read what the compilers say."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.cross_compile import _TYPES, TARGETS, _pointers, type_of

_SERIALISED = re.compile(r"C75\d\d")


@dataclass(frozen=True)
class CompiledGluon:
    """shared: bytes a block. registers: a thread, of all warps alike before they are divided.
    spills: bytes. serialised: what ptxas says of products that it waits for one by one."""

    shared: int
    registers: int
    spills: int
    serialised: tuple[str, ...]
    text: str


def compile_gluon(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]):
    """Compile a Gluon kernel for sm_90; arguments are those of a launch, the last one its config.

    16-byte alignment of every address is assumed, as launches find it.
    """
    names = kernel.arg_names
    signature = {n: _type_of(a) for n, a in zip(names, arguments, strict=True)}
    signature[names[-1]] = "constexpr"
    attrs = {path: [["tt.divisibility", 16]] for path in _pointers(arguments)}
    source = GluonASTSource(kernel, signature, {(len(names) - 1,): arguments[-1]}, attrs)
    compiled = triton.compile(source, target=TARGETS["sm_90"][0], options=options)
    return CompiledGluon(compiled.metadata.shared, *_assemble(compiled.asm["ptx"]))


def _type_of(argument: Any) -> Any:
    if not isinstance(argument, TensorDescriptor):
        return type_of(argument)
    shape = ", ".join(map(str, argument.block_shape))
    return f"tensordesc<{_TYPES[argument.base.dtype]}[{shape}],{argument.layout!r}>"


def _assemble(ptx: str) -> tuple[int, int, tuple[str, ...], str]:
    tool = get_ptxas(90).path
    done = subprocess.run(
        [tool, "-v", "-arch=sm_90a", "-", "-o", "/dev/null"],
        input=ptx, capture_output=True, text=True, check=True,
    )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert registers is not None and spills is not None, done.stderr
    lines = tuple(line for line in done.stderr.splitlines() if _SERIALISED.search(line))
    return int(registers[1]), int(spills[1]), lines, ptx
