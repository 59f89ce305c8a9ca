"""What a first call on a Hopper GPU costs before it runs: how often Triton reads functions."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from tests.kernels.gluon_triton import needs_gluon

needs_gluon(also=True)

# ruff: noqa: E402
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import cross_compile_gluon
from tests.kernels.test_gluon_compile_forward import alibi, call_of, causal, compiled


class _ReadError(Exception):
    """Carries the text of a kernel that was read, so that it is not compiled."""


def _read(source: GluonASTSource, **_: Any) -> None:
    """In place of triton.compile."""
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": 4})
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    raise _ReadError(str(module))


def functions_of(*variant: Any) -> list[str]:
    """Functions that Triton reads for a forward, one entry for each time it does."""
    with (
        mock.patch.object(cross_compile_gluon.triton, "compile", _read),
        pytest.raises(_ReadError) as found,
    ):
        compiled(call_of(*variant))
    return re.findall(r"tt\.func (?:private |public )?@\"?([\w.]+?)__", str(found.value))


def test_consumers_are_read_once():
    """Three warpgroups of one kind in a kernel for D=64, one of them the kernel's own."""
    found = functions_of(64, alibi, causal)
    names = [name.rpartition(".")[2] for name in found]
    assert names.count("_consumer") == 3
    once = ["consume", "plain_tile", "step_weights", "softmax_step", "masked", "rescaled"]
    assert {name: names.count(name) for name in once} == dict.fromkeys(once, 1)


def test_a_forward_imports_no_portable_kernels():
    """Some 20 of 90 jit functions of a first call were of kernels that it does not launch."""
    code = (
        "import sys, attnloom.backends.gluon.launch_forward\n"
        "print(*(n for n in sys.modules if n.startswith('attnloom.backends.triton')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    portable = {"forward", "decode", "merge", "tiles", "backward"}
    assert not portable & {name.rpartition(".")[2] for name in done.stdout.split()}
