"""The problems of the suites on a CUDA device, all in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cases import Mod

DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class GpuCase:
    """query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim].

    variant: a key of MASKS, with "+" and a key of SCORES behind it for a score_mod.
    """

    variant: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def name(self) -> str:
        group = "" if self.heads == self.kv_heads else f"-g{self.heads // self.kv_heads}"
        return f"{self.variant}-b{self.batch}-s{self.kv_len}-d{self.head_dim}{group}"

    @property
    def shape(self) -> list[int]:
        """[B, Hq, Hkv, q_len, kv_len, D]."""
        return [self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim]

    @property
    def mask(self) -> str:
        return self.variant.split("+")[0]

    @property
    def score(self) -> str:
        """The key of SCORES, "" for plain scores."""
        return self.variant.partition("+")[2]

    @property
    def mask_mod(self) -> Mod | None:
        make = MASKS[self.mask]
        return None if make is None else make(self.kv_len)

    def score_mod(self, learned: torch.Tensor | None) -> Mod | None:
        """learned: what learned_table() gave, for scores that have one."""
        if not self.score:
            return None
        if learned is not None:
            return LEARNED[self.score][1](learned)
        return SCORES[self.score](self.heads)

    def learned_table(self) -> torch.Tensor | None:
        """The tensor that the score_mod captures and that wants a gradient, if there is one."""
        if self.score not in LEARNED:
            return None
        draw = torch.Generator(device=DEVICE).manual_seed(1)
        size = LEARNED[self.score][0](self)
        dtype = torch.float32 if len(size) == 1 else torch.bfloat16
        return torch.randn(size, generator=draw, dtype=dtype, device=DEVICE)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """query, key, value from a fixed seed."""
        draw = torch.Generator(device=DEVICE).manual_seed(0)
        lengths = (self.q_len, self.kv_len, self.kv_len)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        sizes = [(self.batch, h, s, self.head_dim) for h, s in zip(heads, lengths, strict=True)]
        arguments = {"generator": draw, "dtype": torch.bfloat16, "device": DEVICE}
        return tuple(torch.randn(size, **arguments) for size in sizes)

    def density(self) -> float:
        """Share of scores kept."""
        mask = self.mask_mod
        if mask is None:
            return 1.0
        keys = torch.arange(self.kv_len, device=DEVICE)
        kept = sum(
            int(mask(0, 0, rows[:, None], keys[None, :]).sum())
            for rows in torch.arange(self.q_len, device=DEVICE).split(1024)
        )
        return kept / self.q_len / self.kv_len


def _causal(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def _window(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def _documents(length: int) -> Mod:
    """Twelve packed causal documents of nearly equal length."""
    ids = torch.arange(length, device=DEVICE) * 12 // length
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def _prefix(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < length // 4)


def _alibi(heads: int) -> Mod:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=DEVICE) / heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def _softcap(heads: int) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: 30 * torch.tanh(score / 30)


def _slope(table: torch.Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx) / 1024


def _queries(table: torch.Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score * table[h, q_idx]


def _bias(table: torch.Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score + table[b, h, q_idx, kv_idx]


MASKS: dict[str, Callable[[int], Mod] | None] = {
    "full": None,
    "causal": _causal,
    "window1024": _window,
    "documents12": _documents,
    "prefix": _prefix,
}
SCORES: dict[str, Callable[[int], Mod]] = {"alibi": _alibi, "softcap": _softcap}
# Name to the size of the learned tensor and the mod that captures it.
LEARNED: dict[str, tuple[Callable[[GpuCase], list[int]], Callable[[torch.Tensor], Mod]]] = {
    "slope": (lambda case: [case.heads], _slope),
    "queries": (lambda case: [case.heads, case.q_len], _queries),
    "bias": (lambda case: [case.batch, case.heads, case.q_len, case.kv_len], _bias),
}

PREFILL = (
    GpuCase("full", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 128),
    GpuCase("full", 4, 16, 16, 8192, 8192, 64),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 64),
    GpuCase("causal", 4, 32, 8, 8192, 8192, 128),
    GpuCase("causal+alibi", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal+softcap", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal+softcap", 4, 16, 16, 8192, 8192, 64),
    GpuCase("window1024", 4, 16, 16, 8192, 8192, 128),
    GpuCase("documents12", 4, 16, 16, 8192, 8192, 128),
    GpuCase("prefix", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 96),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 192),
    GpuCase("causal", 16, 16, 16, 2048, 2048, 128),
    GpuCase("documents12", 16, 16, 16, 2048, 2048, 128),
    GpuCase("causal", 1, 16, 16, 32768, 32768, 128),
    GpuCase("causal+slope", 4, 16, 16, 2048, 2048, 128),
    GpuCase("full+bias", 4, 16, 16, 2048, 2048, 64),
)
DECODE = (
    GpuCase("full", 32, 32, 8, 1, 8192, 128),
    GpuCase("full", 8, 32, 8, 1, 32768, 128),
    GpuCase("full", 1, 32, 8, 1, 131072, 128),
    GpuCase("full", 32, 16, 16, 1, 8192, 64),
)
# As many tokens in every row, 32,768, unless one sequence has more.
SCALING = tuple(
    GpuCase("causal", max(1, 32768 // length), 16, 16 // group, length, length, head_dim)
    for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    for head_dim in (64, 96, 128, 192, 256)
    for group in (1, 4, 8)
)
