"""Ops by kernels: their configurations and launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnloom.backends.triton.choice import keep
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.current import on_device
from attnloom.backends.triton.launcher import Launcher
from attnloom.serving.kernels import rows
from attnloom.serving.ops import Heads, Norm, Turn

_ACTIVATIONS = {"silu": rows.silu, "gelu": rows.gelu, "gelu_pytorch_tanh": rows.gelu_tanh}
_ALIGNMENT = 16  # bytes
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
    """`Ops` in one kernel each."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        _norm(x, x, norm, x, out, False)
        return out

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        summed, out = torch.empty_like(x), torch.empty_like(x)
        _norm(x, added, norm, summed, out, True)
        return summed, out

    def rotate(self, projected: Tensor, turn: Turn, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(projected)
        query = projected.new_empty(num_tokens, heads.num_q, heads.dim)
        key = projected.new_empty(num_tokens, heads.num_kv, heads.dim)
        block = triton.next_power_of_2(heads.dim // 2)
        num_heads = heads.num_q + heads.num_kv
        config = HeadsConfig(heads.num_q, heads.num_kv, heads.dim, _HEADS, block)
        grid = num_tokens * triton.cdiv(num_heads, _HEADS)
        _launch(rows.rotate_kernel, config, grid, 4, projected, *turn, query, key)
        return query, key, projected.unflatten(-1, (-1, heads.dim))[:, num_heads:]

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty(num_tokens, width // 2)
        config = GatedConfig(width // 2, _WIDTH, _ACTIVATIONS[activation])
        grid = num_tokens * triton.cdiv(width // 2, _WIDTH)
        _launch(rows.gated_kernel, config, grid, 4, gate_up, out)
        return out

    def append(
        self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        key, value = new[0].contiguous(), new[1]
        num_tokens, num_kv, dim = key.shape
        if value.stride()[1:] != (dim, 1):
            value = value.contiguous()
        block = triton.next_power_of_2(dim)
        config = HeadsConfig(0, num_kv, dim, _HEADS, block, value.stride(0))
        grid = num_tokens * triton.cdiv(num_kv, _HEADS)
        _launch(rows.append_kernel, config, grid, 4, key, value, *stored, places)


def _norm(x: Tensor, added: Tensor, norm: Norm, summed: Tensor, out: Tensor, adds: bool) -> None:
    num_tokens, size = x.shape
    block = triton.next_power_of_2(size)
    config = NormConfig(size, block, norm.eps, norm.gemma, adds)
    num_warps = min(16, max(1, block // 512))
    _launch(rows.add_norm_kernel, config, num_tokens, num_warps, x, added, norm.weight, summed, out)


_ready: dict[tuple[Any, ...], Launcher] = {}


def _launch(kernel: Any, config: KernelConfig, grid: int, num_warps: int, *args: Tensor) -> None:
    """Launch a kernel over tensors, none of which is empty."""
    if not grid:
        return
    device = args[0].device
    key = kernel, config, grid, device.index, *(arg.dtype for arg in args)
    launcher = _ready.get(key)
    if launcher is None:
        launcher = Launcher(kernel, config, grid, {"num_warps": num_warps})
        keep(_ready, key, launcher)
    with on_device(device):
        launcher(all(arg.data_ptr() % _ALIGNMENT == 0 for arg in args), *args)
