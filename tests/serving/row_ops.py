"""A decoder's operations on drawn inputs, against float64: on devices and interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.serving.ops import TORCH, Heads, Norm, Ops, ops_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Drawn:
    """Draws in a dtype on a device."""

    dtype: torch.dtype
    device: str
    generator: torch.Generator

    @classmethod
    def of(cls, dtype: torch.dtype, device: str, seed: int = 0) -> Drawn:
        return cls(dtype, device, torch.Generator().manual_seed(seed))

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator)
        return drawn.to(self.dtype).to(self.device)


def kernels(device: str, dtype: torch.dtype) -> Ops:
    return ops_for(device, dtype, True)


def wide(value: Any) -> Any:
    """Tensors of reals in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(wide(v) for v in value)
    if isinstance(value, Norm):
        return Norm(value.weight.double(), value.eps, value.gemma)
    return value


class Oracle:
    """In float64, written anew."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight = 1 + norm.weight if norm.gemma else norm.weight
        return x / (x.pow(2).sum(-1, keepdim=True) / x.size(-1) + norm.eps).sqrt() * weight

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return x + added, self.norm(x + added, norm)

    def rotate(self, projected: Tensor, turn: tuple[Tensor, Tensor], heads: Heads) -> Any:
        rows = projected.view(len(projected), -1, heads.dim)
        angle = torch.complex(*turn)
        pairs = torch.complex(rows[..., : heads.dim // 2], rows[..., heads.dim // 2 :]) * angle
        turned = torch.cat((pairs.real, pairs.imag), -1)
        n = heads.num_q
        return turned[:, :n], turned[:, n : n + heads.num_kv], rows[:, n + heads.num_kv :]

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if activation == "silu":
            return gate / (1 + (-gate).exp()) * up
        if activation == "gelu":
            return gate * torch.special.ndtr(gate) * up
        return 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up


def check(
    dtype: torch.dtype, device: str, run: Callable[[Any, tuple[Any, ...]], Any], *args: Any
) -> None:
    """run(ops, args) of the kernels is as near float64 as torch's operators are."""
    found = run(kernels(device, dtype), args)
    plain = run(TORCH, args)
    want = run(Oracle(), tuple(wide(arg) for arg in args))
    if not isinstance(found, tuple):
        found, plain, want = (found,), (plain,), (want,)
    for ours, theirs, exact in zip(found, plain, want, strict=True):
        assert ours.shape == exact.shape and ours.dtype == dtype
        scale = exact.abs().max()
        error, usual = ((x.double() - exact).abs() for x in (ours, theirs))
        slack = 3 if cuts(dtype) else 1
        assert error.max() <= slack * (2 * usual.max() + EPS[dtype] * scale)
        assert error.mean() <= slack * (1.5 * usual.mean() + EPS[dtype] / 64 * scale)
        gain = (ours.double() * exact).sum() / exact.square().sum()
        assert abs(gain - 1) < (2 * EPS[dtype] if cuts(dtype) else 1e-3)


def cuts(dtype: torch.dtype) -> bool:
    """Triton's interpreter cuts bfloat16 off where devices round."""
    return INTERPRETED and dtype == torch.bfloat16


def check_norms(dtype: torch.dtype, device: str, num_tokens: int, size: int, gemma: bool) -> None:
    draw = Drawn.of(dtype, device)
    x, added, weight = draw(num_tokens, size) * 3, draw(num_tokens, size), draw(size)
    norm = Norm(weight, 1e-5, gemma)
    check(dtype, device, lambda ops, args: ops.norm(*args), x, norm)
    check(dtype, device, lambda ops, args: ops.add_norm(*args), x, added, norm)
    summed, _ = kernels(device, dtype).add_norm(x, added, norm)
    assert cuts(dtype) or torch.equal(summed, x + added)
    zero = torch.zeros_like(x)
    assert torch.equal(kernels(device, dtype).norm(zero, norm), zero)


def check_rotation(dtype: torch.dtype, device: str, num_tokens: int, heads: Heads) -> None:
    draw = Drawn.of(dtype, device)
    projected = draw(num_tokens, (heads.num_q + 2 * heads.num_kv) * heads.dim)
    angles = draw(num_tokens, 1, heads.dim // 2).float() * 5
    turn = angles.cos().to(dtype), angles.sin().to(dtype)
    check(dtype, device, lambda ops, args: ops.rotate(*args), projected, turn, heads)


def check_gates(
    dtype: torch.dtype, device: str, num_tokens: int, size: int, activation: str
) -> None:
    gate_up = Drawn.of(dtype, device)(num_tokens, 2 * size) * 4
    check(dtype, device, lambda ops, args: ops.gated(*args), gate_up, activation)


def check_appends(dtype: torch.dtype, device: str, num_tokens: int, heads: Heads) -> None:
    """Rows that are named get their numbers, others keep theirs; values lie in longer rows."""
    draw = Drawn.of(dtype, device)
    rows = draw(num_tokens, heads.num_q + 2 * heads.num_kv, heads.dim)
    num_rows = num_tokens * heads.num_kv
    for value in (rows[:, -heads.num_kv :], draw(num_tokens, heads.num_kv, heads.dim)):
        key = draw(num_tokens, heads.num_kv, heads.dim)
        places = torch.randperm(3 * num_rows, generator=draw.generator)[:num_rows].to(device)
        stored = [
            tuple(
                torch.full((3 * num_rows, heads.dim), 7.0, dtype=dtype, device=device)
                for _ in range(2)
            )
            for _ in range(2)
        ]
        kernels(device, dtype).append((key, value), stored[0], places)
        TORCH.append((key, value), stored[1], places)
        for found, want in zip(*stored, strict=True):
            assert torch.equal(found, want)
