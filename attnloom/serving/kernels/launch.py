"""Ops by kernels: their configurations and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.current import on_device
from attnloom.backends.triton.launcher import Launcher, are_aligned
from attnloom.serving.kernels import rows
from attnloom.serving.ops import Heads, Norm, Turn

_ACTIVATIONS = {"silu": rows.silu, "gelu": rows.gelu, "gelu_pytorch_tanh": rows.gelu_tanh}
_WIDTH = 1024  # numbers of a program of 4 warps: 16 bytes a thread in halves
_HEADS = 8


@dataclass(frozen=True, repr=False)
class NormConfig(KernelConfig):
    """C numbers a row, in a block of BLOCK."""

    C: int
    BLOCK: int
    EPS: float
    GEMMA: bool
    ADDS: bool

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class GatedConfig(KernelConfig):
    """C numbers a row, WIDTH a program."""

    C: int
    WIDTH: int
    ACTIVATION: Any

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, repr=False)
class HeadsConfig(KernelConfig):
    """HQ and HKV heads of D numbers, HEADS a program, in blocks of BLOCK numbers (or pairs).
    VALUE_ROW: from a token's values to the next one's."""

    HQ: int
    HKV: int
    D: int
    HEADS: int
    BLOCK: int
    VALUE_ROW: int = 0

    __hash__ = KernelConfig.__hash__


class KernelOps:
    """`Ops` in one kernel each.

    Launches are remembered by what kernels and their grids depend on, plain numbers that are
    compared sooner than a configuration is made: outside of graphs a layer starts five of them.
    """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        _norm(x, x, norm, x, out, False)
        return out

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        summed, out = torch.empty_like(x), torch.empty_like(x)
        _norm(x, added, norm, summed, out, True)
        return summed, out

    def rotate(self, projected: Tensor, turn: Turn, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, num_q, num_kv, dim = len(projected), heads.num_q, heads.num_kv, heads.dim
        query = projected.new_empty(num_tokens, num_q, dim)
        key = projected.new_empty(num_tokens, num_kv, dim)
        form = ("rotate", num_q, num_kv, dim)

        def made() -> _Made:
            block = triton.next_power_of_2(dim // 2)
            config = HeadsConfig(num_q, num_kv, dim, _HEADS, block)
            return rows.rotate_kernel, config, triton.cdiv(num_q + num_kv, _HEADS), 4

        _launch(form, made, num_tokens, projected, *turn, query, key)
        return query, key, projected.view(num_tokens, -1, dim)[:, num_q + num_kv :]

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        num_tokens, size = len(gate_up), gate_up.size(1) // 2
        out = gate_up.new_empty(num_tokens, size)

        def made() -> _Made:
            config = GatedConfig(size, _WIDTH, _ACTIVATIONS[activation])
            return rows.gated_kernel, config, triton.cdiv(size, _WIDTH), 4

        _launch(("gated", size, activation), made, num_tokens, gate_up, out)
        return out

    def append(
        self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        key, value = new[0].contiguous(), new[1]
        num_tokens, num_kv, dim = key.shape
        if value.stride()[1:] != (dim, 1):
            value = value.contiguous()
        value_row = value.stride(0)

        def made() -> _Made:
            block = triton.next_power_of_2(dim)
            config = HeadsConfig(0, num_kv, dim, _HEADS, block, value_row)
            return rows.append_kernel, config, triton.cdiv(num_kv, _HEADS), 4

        form = ("append", num_kv, dim, value_row)
        _launch(form, made, num_tokens, key, value, *stored, places)


def _norm(x: Tensor, added: Tensor, norm: Norm, summed: Tensor, out: Tensor, adds: bool) -> None:
    num_tokens, size = x.shape

    def made() -> _Made:
        block = triton.next_power_of_2(size)
        config = NormConfig(size, block, norm.eps, norm.gemma, adds)
        return rows.add_norm_kernel, config, 1, min(16, max(1, block // 512))

    form = ("norm", size, norm.eps, norm.gemma, adds)
    _launch(form, made, num_tokens, x, added, norm.weight, summed, out)


# kernel, its configuration, programs a token, warps
_Made = tuple[Any, KernelConfig, int, int]
_ready: dict[tuple[Any, ...], Launcher] = {}


def _launch(
    form: tuple[Any, ...], made: Callable[[], _Made], num_tokens: int, *args: Tensor
) -> None:
    """Launch a kernel over tensors of tokens; form: what its configuration depends on."""
    if not num_tokens:
        return
    device = args[0].device
    key = (form, num_tokens, device.index, *[arg.dtype for arg in args])
    launcher = _ready.get(key)
    if launcher is None:
        kernel, config, programs, num_warps = made()
        launcher = Launcher(kernel, config, num_tokens * programs, {"num_warps": num_warps})
        keep(_ready, key, launcher)
    with on_device(device):
        launcher(are_aligned(args), *args)
