"""One attention problem to check: what to draw, and the drawn tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.harness.draw import Draw, Sizes
from tests.harness.mods import Captures, Mod, ModPair, row_of

MARGIN = 64  # elements of NaN before and after each tensor: what is read from there shows


@dataclass(frozen=True)
class Case:
    """A problem by its description; everything random follows from `seed` and the name of the mod.

    mod: a row of MODS or PUBLISHED.
    layout: how query, key and value lie in memory, see LAYOUTS.
    kv_dtype: dtype of key and value if it differs from dtype.
    kv_batch: batch of key and value, B or 1.
    lse_gradient: whether the loss depends on lse too.
    magnitude: factor on query, so that scores of every size occur.
    """

    mod: str = "plain"
    sizes: Sizes = field(default_factory=Sizes)
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_batch: int | None = None
    layout: str = "contiguous"
    block_size: int | tuple[int, int] = 32
    scale: float | None = None
    lse_gradient: bool = True
    magnitude: float = 1.0
    seed: int = 0

    @property
    def row(self) -> Mod:
        return row_of(self.mod)

    def with_seed(self, seed: int) -> Case:
        return replace(self, seed=seed)

    def __str__(self) -> str:
        s = self.sizes
        parts = [self.mod, str(self.dtype).removeprefix("torch.")]
        parts.append(f"B{s.B}H{s.Hq}-{s.Hkv}S{s.Q_LEN}-{s.KV_LEN}D{s.D}-{s.Dv}")
        if self.layout != "contiguous":
            parts.append(self.layout)
        return ".".join(parts)


@dataclass(frozen=True)
class Problem:
    """The tensors of a case. Those whose gradient is checked are leaves that require grad.

    dout [B, Hq, Q_LEN, Dv] in the dtype of query; dlse [B, Hq, Q_LEN] or None.
    """

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    captures: Captures
    dout: torch.Tensor
    dlse: torch.Tensor | None

    @property
    def mods(self) -> ModPair:
        return self.case.row.build(self.captures, self.case.sizes)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Tensors to differentiate, by the name of their gradient."""
        learnable = {f"d_{name}": self.captures[name] for name in self.case.row.learnable}
        return {"dq": self.query, "dk": self.key, "dv": self.value, **learnable}

    def copy(self, dtype: torch.dtype | None = None) -> Problem:
        """Fresh leaves of equal values and strides; floating tensors are cast to dtype if given."""

        def leaf(tensor: torch.Tensor, learnable: bool) -> torch.Tensor:
            fresh = _surrounded(tensor)
            if dtype is not None and tensor.is_floating_point():
                fresh = fresh.to(dtype)
            return fresh.requires_grad_(learnable)

        return Problem(
            self.case,
            *(leaf(x, True) for x in (self.query, self.key, self.value)),
            {k: leaf(v, k in self.case.row.learnable) for k, v in self.captures.items()},
            leaf(self.dout, False),
            None if self.dlse is None else leaf(self.dlse, False),
        )


def _surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose strides leave gaps of NaN and whose memory begins and ends with NaN."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor.detach().clone()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.full((reach + 1 + 2 * MARGIN,), torch.nan, dtype=tensor.dtype)
    fresh = room.as_strided(tensor.shape, tensor.stride(), MARGIN)
    return fresh.copy_(tensor.detach())


def draw_problem(case: Case) -> Problem:
    """Draw a case's tensors in their target dtypes."""
    s = case.sizes
    generator = torch.Generator().manual_seed(zlib.crc32(case.mod.encode()) + case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arrange = LAYOUTS[case.layout]
    kv_dtype = case.kv_dtype or case.dtype
    kv_batch = s.B if case.kv_batch is None else case.kv_batch
    query = arrange((normal(s.B, s.Hq, s.Q_LEN, s.D) * case.magnitude).to(case.dtype))
    key = arrange(normal(kv_batch, s.Hkv, s.KV_LEN, s.D).to(kv_dtype))
    value = arrange(normal(kv_batch, s.Hkv, s.KV_LEN, s.Dv).to(kv_dtype))
    captures = case.row.draw(s, Draw(case.seed + 1, case.dtype))
    dout = normal(s.B, s.Hq, s.Q_LEN, s.Dv).to(case.dtype)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    dlse = normal(s.B, s.Hq, s.Q_LEN).to(lse_dtype) if case.lse_gradient else None
    return Problem(case, query, key, value, captures, dout, dlse).copy()


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] as a view of memory laid out [B, L, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """Every dimension has gaps, the last one too."""
    room = x.new_empty([2 * n for n in x.shape])
    view = room[::2, ::2, ::2, ::2]
    view.copy_(x)
    return view


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Unit last stride, but rows that are not aligned to any vector width."""
    room = x.new_empty([*x.shape[:3], x.shape[3] + 3])
    room[..., 1 : 1 + x.shape[3]] = x
    return room[..., 1 : 1 + x.shape[3]]


def _column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "strided": _strided,
    "padded_rows": _padded_rows,
    "column_major": _column_major,
}
