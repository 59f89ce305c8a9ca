"""Which backend runs a problem, and why: planning's own questions, answered in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.api.launch import Launch
from attnloom.api.planning import plan_launch
from attnloom.backends import registry
from attnloom.backends.cpu import toolchain
from attnloom.backends.cpu.schedule import decode_schedule
from attnloom.backends.cpu.widths import needs_wide_ints
from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.errors import counted
from attnloom.ir.node import BoundProgram
from attnloom.plan.choose import candidates
from attnloom.plan.problem import KernelOptions
from attnloom.tools.setting import Setting

_WHAT = {
    "cpu": "fused C++ kernels, compiled for this machine on first use",
    "gluon": "fused kernels for Hopper (TMA, warp-specialised), written in Gluon",
    "triton": "fused Triton kernels",
    "tiled": "tiled torch operators: linear memory, no compiler, several times slower than fused",
}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A backend that comes first for the device and cannot run the problem."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """backend: the one that runs the forward and the backward. kernel: which of its kernels the
    forward uses. why: in words. rejected: those that were preferred."""

    backend: str
    kernel: str
    why: str
    rejected: tuple[Rejection, ...]


def choose_backend(
    setting: Setting,
    score: BoundProgram | None,
    mask: BoundProgram | None,
    blocks: BlockLists | None,
    options: KernelOptions,
) -> BackendChoice:
    """Plan a problem without running it.

    Raises:
        UnsupportedError: a chosen backend cannot run it.
    """
    inputs = setting.placeholders()
    launch, tensors = plan_launch(inputs, score, mask, blocks, setting.head_dim**-0.5, options)
    name = launch.plan.backend
    call = launch.call(*inputs, tensors)
    if options.backend != "auto":
        why = f"chosen by kernel_options={{'backend': '{name}'}}"
    else:
        why = f"the first that can run it on {setting.device}: {_WHAT[name]}"
    rejected = _rejected(setting, call, launch, options)
    warning = next((c.warning for c in _candidates(setting, options) if c.backend == name), None)
    return BackendChoice(name, _kernel(name, call), f"{why}. {warning or ''}".strip(), rejected)


def _candidates(setting: Setting, options: KernelOptions):
    has_compiler = toolchain.available() is not None
    return candidates(options, setting.device.type, has_compiler)


def _rejected(
    setting: Setting, call: AttentionCall, launch: Launch, options: KernelOptions
) -> tuple[Rejection, ...]:
    found: list[Rejection] = []
    for candidate in _candidates(setting, options):
        if candidate.backend == launch.plan.backend:
            break
        reason = registry.load(candidate.backend).unsupported(call)
        found.append(Rejection(candidate.backend, reason or "another backend was planned"))
    return tuple(found)


def _kernel(backend: str, call: AttentionCall) -> str:
    if backend != "cpu":
        return "forward"
    threads = torch.get_num_threads()
    if decode_schedule(call, threads) is not None:
        rows = counted(call.query.size(2), "row")
        name = f"decode (query has {rows}; keys are split over threads)"
    else:
        name = "forward"
    lanes = "64-bit" if needs_wide_ints(call) else "32-bit"
    return f"{name}, {counted(threads, 'thread')}, {lanes} integer lanes"
