"""Compile Gluon kernels for a Hopper GPU that is not there, and read what the compilers say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.signatures import type_of
from tests.kernels.cross_compile import TARGETS, _pointers, assemble

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
    signature = {n: type_of(a) for n, a in zip(names, arguments, strict=True)}
    signature[names[-1]] = "constexpr"
    attrs = {path: [["tt.divisibility", 16]] for path in _pointers(arguments)}
    source = GluonASTSource(kernel, signature, {(len(names) - 1,): arguments[-1]}, attrs)
    compiled = triton.compile(source, target=TARGETS["sm_90"][0], options=options)
    return CompiledGluon(compiled.metadata.shared, *_assemble(compiled.asm["ptx"]))


def _assemble(ptx: str) -> tuple[int, int, tuple[str, ...], str]:
    registers, spills, said = assemble(ptx, "sm_90a")
    lines = tuple(line for line in said.splitlines() if _SERIALISED.search(line))
    return registers, spills, lines, ptx
