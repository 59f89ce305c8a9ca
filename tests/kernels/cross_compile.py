"""Compile Triton kernels for GPUs that are not there, and read what the compilers say."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attnloom.backends.triton import configs
from attnloom.backends.triton.launcher import with_fusion
from benchmarks.signatures import type_of

# name -> (target, shared memory a block may use, device as configs.py sees it)
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), configs.Device(75, 65536, 68, 5 << 20)),
    "sm_80": (GPUTarget("cuda", 80, 32), configs.Device(80, 166912, 108, 40 << 20)),
    "sm_86": (GPUTarget("cuda", 86, 32), configs.Device(86, 101376, 84, 6 << 20)),
    "sm_90": (GPUTarget("cuda", 90, 32), configs.Device(90, 232448, 132, 50 << 20)),
    "sm_100": (GPUTarget("cuda", 100, 32), configs.Device(100, 232448, 148, 126 << 20)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), configs.Device(0, 65536, 304, 4 << 20)),
}


@dataclass(frozen=True)
class Compiled:
    """shared: bytes a block. registers, spills (bytes): by ptxas; None off NVIDIA."""

    shared: int
    registers: int | None
    spills: int | None
    text: str


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
    compiled = triton.compile(source, target=target, options=with_fusion(arguments[-1], options))
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
    match = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert match is not None
    return assemble(ptx, match[1])[:2]


def assemble(ptx: str, arch: str) -> tuple[int, int, str]:
    """Registers a thread, bytes of spill stores, and all that ptxas says for an architecture."""
    digits = re.search(r"\d+", arch)
    assert digits is not None
    done = subprocess.run(
        [get_ptxas(int(digits[0])).path, "-v", f"-arch={arch}", "-", "-o", "/dev/null"],
        input=ptx, capture_output=True, text=True, check=True,
    )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert registers is not None and spills is not None, done.stderr
    return int(registers[1]), int(spills[1]), done.stderr


def assembly(ptx: str) -> str:
    """What ptxas makes of a kernel, as cuobjdump reads it."""
    match = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert match is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as made:
        command = [get_ptxas(int(match[2])).path, f"-arch={match[1]}", "-", "-o", made.name]
        subprocess.run(command, input=ptx, text=True, check=True)
        shown = [knobs.nvidia.cuobjdump.path, "-sass", made.name]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


class CompilingLauncher:
    """In place of launcher.Launcher: compiles instead of launching."""

    target = "sm_90"
    compiled: dict[str, Compiled] = {}

    def __init__(self, kernel, config, grid, options) -> None:
        self.kernel, self.config, self.options = kernel, config, options

    def __call__(self, aligned, *args) -> None:
        made = compile_for(self.target, self.kernel, (*args, self.config), self.options)
        self.compiled[self.kernel.__name__] = made
