"""What a decoder does between its products: by torch's operators, or by a kernel each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from attnloom.errors import OptionError

Turn = tuple[Tensor, Tensor]

# Types in which a device has shown the kernels right.
_SHOWN: dict[str, tuple[torch.dtype, ...]] = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16)
}
_TAKEN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Heads:
    """Of an attention layer: query heads, key heads, numbers in each."""

    num_q: int
    num_kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight; gemma: * (1 + weight), rounded once. weight: [C]."""

    weight: Tensor
    eps: float
    gemma: bool


class Ops(Protocol):
    """T tokens, C numbers each; all tensors contiguous, of one dtype."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """[T, C] -> [T, C]."""
        ...

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + added, and that normed; [T, C] each."""
        ...

    def rotate(self, projected: Tensor, turn: Turn, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, H, D] of projected [T, (Hq + 2 Hkv) * D]; in queries and
        keys each pair (i, i + D / 2) is turned by its angle, whose cosines and sines are turn,
        [T, 1, D / 2] each."""
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, [T, C], of [T, 2 C]."""
        ...

    def append(
        self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        """Keys and values [T, Hkv, D] into rows `places` [T * Hkv] of stored [R, D]; values may be
        a part of longer rows."""
        ...


class TorchOps:
    """By torch's operators, wherever torch runs."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        if norm.gemma:
            return (wide * (1 + norm.weight.float())).to(x.dtype)
        return norm.weight * wide.to(x.dtype)

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        x = x + added
        return x, self.norm(x, norm)

    def rotate(self, projected: Tensor, turn: Turn, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        rows = projected.unflatten(-1, (-1, heads.dim))  # [T, H, D]
        query, key, value = rows.split((heads.num_q, heads.num_kv, heads.num_kv), dim=1)
        return _turned(query, turn), _turned(key, turn), value

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up

    def append(
        self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        for rows, into in zip(new, stored, strict=True):
            into.index_copy_(0, places, rows.reshape(-1, into.size(1)))


def _turned(x: Tensor, turn: Turn) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


TORCH = TorchOps()


@functools.cache
def ops_for(device_type: str, dtype: torch.dtype, kernels: bool | None) -> Ops:
    """The operations of a model there.

    Args:
        kernels: True: one kernel each; False: torch's; None: kernels where a device has shown them
            right.
    Raises:
        OptionError: kernels are asked for where there are none.
    """
    if kernels is None:
        kernels = dtype in _SHOWN.get(device_type, ())
    if not kernels:
        return TORCH
    from attnloom.backends.triton.interpreter import INTERPRETED

    wanted = "cpu" if INTERPRETED else "cuda"
    if device_type != wanted or dtype not in _TAKEN:
        raise OptionError(
            f"kernels is True, but the model is {dtype} on {device_type}; a decoder's kernels take "
            f"{', '.join(map(str, _TAKEN))} on a CUDA device. None takes them where a device has "
            "shown them right."
        )
    from attnloom.serving.kernels.launch import KernelOps

    return KernelOps()
