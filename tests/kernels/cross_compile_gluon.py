"""Compile Gluon kernels for a Hopper GPU that is not there, and read what the compilers say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from attnloom.backends.gluon.rings import KEYS_LEFT
from benchmarks.signatures import type_of
from tests.kernels.barrier_memory import given_away
from tests.kernels.cross_compile import TARGETS, _pointers, assemble

_SERIALISED = re.compile(r"C75\d\d")
_NAMED = re.compile(r"\tbar(?:rier)?\.sync\s+(\d+)")


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

    Raises:
        AssertionError: other things lie where the kernel's barriers do (barrier_memory.py), or
            Triton uses named barriers that are ours.
    """
    source = _source(kernel, arguments)
    compiled = triton.compile(source, target=TARGETS["sm_90"][0], options=options)
    wrong = given_away(compiled.asm["ttgir"], compiled.asm["ptx"])
    assert not wrong, f"{kernel.__name__}: {'; '.join(wrong)}"
    numbers = {int(number) for number in _NAMED.findall(compiled.asm["ptx"])}
    assert max(numbers, default=0) < KEYS_LEFT.value, f"named barriers {sorted(numbers)}"
    return CompiledGluon(compiled.metadata.shared, *_assemble(compiled.asm["ptx"]))


def lowered(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int]) -> str:
    """The first of what is made of a kernel on the way to a compiled one, its TTGIR: in a tenth of
    the time."""
    target = TARGETS["sm_90"][0]
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = _source(kernel, arguments)
    parsed = backend.parse_options(options | source.parse_options())
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    return str(stages["ttgir"](module, {}))


def _source(kernel: Any, arguments: tuple[Any, ...]) -> GluonASTSource:
    names = kernel.arg_names
    signature = {n: type_of(a) for n, a in zip(names, arguments, strict=True)}
    signature[names[-1]] = "constexpr"
    attrs = {path: [["tt.divisibility", 16]] for path in _pointers(arguments)}
    return GluonASTSource(kernel, signature, {(len(names) - 1,): arguments[-1]}, attrs)


def _assemble(ptx: str) -> tuple[int, int, tuple[str, ...], str]:
    registers, spills, said = assemble(ptx, "sm_90a")
    lines = tuple(line for line in said.splitlines() if _SERIALISED.search(line))
    return registers, spills, lines, ptx
