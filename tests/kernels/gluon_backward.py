"""Attention with the Gluon backward, whatever the size of the problem, behind a portable forward or
its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from attnloom.backends.gluon import launch_backward
from attnloom.backends.registry import AttentionCall, Gradients
from attnloom.backends.triton.launch import TritonBackend
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.implementations import attnloom_with


@contextlib.contextmanager
def gluon_backward(portable: bool = False) -> Iterator[None]:
    """Inside, the Triton backend's backward is the Gluon one. Spills are no reason for
    the portable kernels here, nor is deterministic mode, by which the harness draws memory, or what
    "auto" would prefer. portable: whether those kernels are expected in the end."""
    backend, portable_backward = TritonBackend(), TritonBackend.backward
    used: list[str] = []

    def fused(_: TritonBackend, call: AttentionCall, *rest: Any) -> Gradients:
        options = replace(call.options, deterministic=False)
        return launch_backward.backward(replace(call, options=options), *rest)

    class Portable:
        def backward(self, *args: Any) -> Gradients:
            used.append("portable")
            return portable_backward(backend, *args)

    with (
        mock.patch.object(TritonBackend, "backward", fused),
        mock.patch.object(launch_backward, "FEW_SPILLS", 1 << 20),
        mock.patch.object(launch_backward, "load", lambda _: Portable()),
    ):
        yield
    assert bool(used) == portable, "the kernels that ran are not those that were to be tested"


@contextlib.contextmanager
def gluon_alone() -> Iterator[None]:
    """Inside, backend "gluon" computes gradients in its own kernels, whatever they spill and though
    the harness draws memory by deterministic mode."""
    backward = launch_backward.backward

    def fused(call: AttentionCall, *rest: Any) -> Gradients:
        options = replace(call.options, deterministic=False)
        return backward(replace(call, options=options), *rest)

    def portable(_: str) -> Any:
        raise AssertionError("the portable kernels were to compute gradients")

    with (
        mock.patch.object(launch_backward, "backward", fused),
        mock.patch.object(launch_backward, "FEW_SPILLS", 1 << 20),
        mock.patch.object(launch_backward, "load", portable),
    ):
        yield


def check_gradients(case: Case, portable: bool = False, **options: Any) -> None:
    """Every result and gradient of a case, within the harness's error budget."""
    with gluon_backward(portable):
        check_attention(case, attnloom_with("cuda", backend="triton", **options))


def repeated(mask_mod: Any, head_dim: int) -> list[tuple[torch.Tensor, ...]]:
    """Gradients of one forward, and the same twenty times more, on two other streams in turn."""
    import attnloom

    draw = torch.Generator(device="cuda").manual_seed(0)
    size, like = (4, 16, 1000, head_dim), {"dtype": torch.bfloat16, "device": "cuda"}
    *leaves, dout = (torch.randn(size, generator=draw, **like) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    mask = attnloom.create_block_mask(mask_mod, None, None, 1000, 1000, device="cuda")
    options = {"backend": "gluon"}
    out = attnloom.flex_attention(*leaves, block_mask=mask, kernel_options=options)
    found = [torch.autograd.grad(out, leaves, dout, retain_graph=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))
    torch.cuda.synchronize()
    return found
