"""Kernels of first calls are compiled without LLVM's passes, by the thread that asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.kernels.gluon_triton import needs_gluon

needs_gluon(also=True)

# ruff: noqa: E402
from triton.backends.nvidia import compiler

from attnloom.backends.gluon import configs_forward, launch_forward
from attnloom.backends.triton import hasty
from tests.kernels.test_gluon_compile_forward import BF16, call_of, causal, compiled


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What LLVM was asked for, with nothing on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Any] = []
    plain = compiler.llvm.optimize_module

    def optimize_module(module: Any, level: Any, *args: Any, **options: Any) -> Any:
        found.append(level)
        return plain(module, level, *args, **options)

    monkeypatch.setattr(compiler.llvm, "optimize_module", optimize_module)
    monkeypatch.setattr(hasty, "_here", hasty.threading.local())
    hasty._install()
    return found


def test_only_first_calls_leave_out_what_ptxas_does_again(levels: list[Any]) -> None:
    usual, *_ = configs_forward.forms(64, 64, 128)
    quick = configs_forward.quick(usual)
    assert quick is not None
    assert (usual.hasty, quick.hasty) == (False, True)
    for form in (usual, quick):
        call = call_of(64, None, causal, BF16)
        with (
            mock.patch.object(launch_forward, "_in_order", lambda *_, form=form: (form,)),
            hasty.hastily(form.hasty),
        ):
            compiled(call)
    assert levels == [compiler.llvm.OPTIMIZE_O3, compiler.llvm.OPTIMIZE_O0]
