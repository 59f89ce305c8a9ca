"""Which backend runs a call: "auto" may choose, an explicit choice never falls back."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from attnloom import compile_stats, flex_attention, reset_compile_stats
from attnloom.api import near, planning, repeats
from attnloom.backends import registry
from attnloom.backends.cpu import toolchain
from attnloom.errors import UnsupportedError
from attnloom.plan import choose
from attnloom.plan.choose import candidates
from attnloom.plan.problem import KernelOptions
from tests.api.mods import qkv


@pytest.fixture(autouse=True)
def _nothing_is_planned_yet(monkeypatch):
    monkeypatch.setattr(planning, "_plans", {})
    monkeypatch.setattr(repeats, "_buckets", {})
    monkeypatch.setattr(near, "_calls", {})
    monkeypatch.setattr(planning, "_warned", set())


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "available", lambda: None)


def test_auto_without_a_compiler_runs_tiled_and_says_so_once(no_compiler):
    inputs = qkv(key_heads=4)
    want = flex_attention(*inputs, kernel_options={"backend": "reference"})
    reset_compile_stats()
    with pytest.warns(UserWarning, match=r"found no C\+\+ compiler.*pip install ziglang"):
        torch.testing.assert_close(flex_attention(*inputs), want)
    assert compile_stats().fallbacks == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(*inputs)
        flex_attention(*(x.float() for x in inputs))


def test_cpu_without_a_compiler_is_an_error(no_compiler):
    with pytest.raises(UnsupportedError, match=r"backend 'cpu' cannot run this: .*compiler"):
        flex_attention(*qkv(key_heads=4), kernel_options={"backend": "cpu"})


def test_auto_passes_over_a_backend_that_cannot_run_the_problem(monkeypatch):
    monkeypatch.setattr(type(registry.load("cpu")), "unsupported", lambda *_: "it is Sunday.")
    with pytest.warns(UserWarning, match="backend 'cpu' cannot run this: it is Sunday"):
        flex_attention(*qkv(key_heads=4))


@pytest.mark.parametrize(
    ("chosen", "device", "has_compiler", "want"),
    [
        ("auto", "cpu", True, ["cpu", "tiled"]),
        ("auto", "cpu", False, ["tiled"]),
        ("auto", "xpu", True, ["tiled"]),
        ("auto", "cuda", False, ["gluon", "triton", "tiled"]),
        ("gluon", "cuda", True, ["gluon"]),
        ("triton", "cuda", True, ["triton"]),
        ("tiled", "cuda", True, ["tiled"]),
        ("tiled", "cpu", True, ["tiled"]),
    ],
)
def test_candidates(chosen, device, has_compiler, want):
    found = candidates(KernelOptions(backend=chosen), device, has_compiler)
    assert [c.backend for c in found] == want


def test_cuda_without_triton_is_tiled_with_a_warning(monkeypatch):
    monkeypatch.setattr(choose, "_has_triton", lambda: False)
    (candidate,) = candidates(KernelOptions(), "cuda", True)
    assert candidate.backend == "tiled"
    assert candidate.warning is not None
    assert "triton is not installed" in candidate.warning
    with pytest.raises(UnsupportedError, match="needs the package triton"):
        candidates(KernelOptions(backend="triton"), "cuda", True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="there it does run")
def test_triton_kernels_refuse_cpu_tensors():
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="backend 'triton' cannot run this: query is on cpu"):
        flex_attention(*qkv(key_heads=4), kernel_options={"backend": "triton"})


def test_a_device_without_kernels_of_its_own_gets_a_warning():
    (candidate,) = candidates(KernelOptions(), "xpu", True)
    assert candidate.warning is not None
    assert "runs as tiled torch operators" in candidate.warning


def test_cpu_kernels_refuse_other_devices():
    with pytest.raises(UnsupportedError, match="backend 'cpu' runs on CPU tensors"):
        candidates(KernelOptions(backend="cpu"), "cuda", True)


def test_other_devices_do_not_ask_for_a_compiler(monkeypatch):
    def asked():
        raise AssertionError("a problem of no CPU asked for a compiler")

    monkeypatch.setattr(toolchain, "available", asked)
    inputs = tuple(x.to("meta") for x in qkv())
    launch, _ = planning.plan_launch(inputs, None, None, None, 1.0, KernelOptions())
    assert launch.plan.backend == "tiled"
