"""What is measured: attention variants and the shapes they run at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Mod = Callable[..., torch.Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SOFT_CAP = 30.0
WINDOW_LEFT = 256
NUM_DOCUMENTS = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of attention.

    mask: length -> mask_mod, or None. score: Hq -> score_mod, or None.
    additive: the score_mod only adds a bias that does not depend on the score, so that SDPA can
        express it with a dense float mask.
    is_causal: the mask is exactly q_idx >= kv_idx.
    """

    name: str
    mask: Callable[[int], Mod] | None = None
    score: Callable[[int], Mod] | None = None
    additive: bool = True
    is_causal: bool = False


def causal(length: int) -> Mod:
    """mask_mod: keys up to the query's own position."""
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def causal_window(length: int, window_left: int = WINDOW_LEFT) -> Mod:
    """mask_mod: causal, at most window_left keys before the query."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= window_left)


def document_ids(length: int, num_documents: int = NUM_DOCUMENTS, seed: int = 0) -> torch.Tensor:
    """[length] int64 ascending ids of uneven packed documents."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randperm(length - 1, generator=generator)[: num_documents - 1] + 1
    ids = torch.zeros(length, dtype=torch.int64)
    ids[starts] = 1
    return ids.cumsum(0)


def documents(length: int) -> Mod:
    """mask_mod: keys of the query's own document, in both directions."""
    ids = document_ids(length)
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def alibi(num_heads: int) -> Mod:
    """score_mod: one slope a head times the distance (Press et al. 2022)."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def soft_cap(num_heads: int) -> Mod:
    """score_mod: scores squeezed into (-SOFT_CAP, SOFT_CAP)."""
    return lambda score, b, h, q_idx, kv_idx: SOFT_CAP * torch.tanh(score / SOFT_CAP)


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("full"),
        Variant("causal", mask=causal, is_causal=True),
        Variant("window", mask=causal_window),
        Variant("documents", mask=documents),
        Variant("causal_alibi", mask=causal, score=alibi),
        Variant("causal_softcap", mask=causal, score=soft_cap, additive=False),
        Variant("alibi", score=alibi),
        Variant("softcap", score=soft_cap, additive=False),
    )
}
PREFILL_VARIANTS = ("full", "causal", "window", "documents", "causal_alibi", "causal_softcap")
DECODE_VARIANTS = ("full", "alibi", "softcap")


@dataclass(frozen=True, slots=True)
class Case:
    """A variant at a shape: query [B, Hq, q_len, D], key and value [B, Hkv, kv_len, D]."""

    variant: str
    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str

    @property
    def name(self) -> str:
        length = self.kv_len if self.q_len in (1, self.kv_len) else f"{self.q_len}x{self.kv_len}"
        return f"{self.variant}-s{length}-d{self.head_dim}"

    @property
    def shape(self) -> list[int]:
        """[B, Hq, Hkv, q_len, kv_len, D]."""
        return [
            self.batch,
            self.num_heads,
            self.num_kv_heads,
            self.q_len,
            self.kv_len,
            self.head_dim,
        ]

    def inputs(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key, value, drawn from a seed in the case's dtype."""
        generator = torch.Generator().manual_seed(seed)
        sizes = (
            (self.num_heads, self.q_len),
            (self.num_kv_heads, self.kv_len),
            (self.num_kv_heads, self.kv_len),
        )
        query, key, value = (
            torch.randn(
                self.batch, heads, length, self.head_dim, generator=generator, dtype=torch.float32
            ).to(DTYPES[self.dtype])
            for heads, length in sizes
        )
        return query, key, value


def prefill_cases(dtypes: list[str], all_sizes: bool) -> list[Case]:
    """Four lengths by six variants; head size 128 at 512 and 2048, 64 at 1024 and 4096 (24 cases a
    dtype), or both head sizes at every length."""
    sizes = ((512, 128), (1024, 64), (2048, 128), (4096, 64))
    if all_sizes:
        sizes = tuple((length, head_dim) for length, _ in sizes for head_dim in (64, 128))
    return [
        Case(variant, 1, 8, 8, length, length, head_dim, dtype)
        for dtype in dtypes
        for length, head_dim in sizes
        for variant in PREFILL_VARIANTS
    ]


def decode_cases(dtypes: list[str]) -> list[Case]:
    """One query against 4,096 cached keys, four query heads to a key head."""
    return [
        Case(variant, 4, 32, 8, 1, 4096, 128, dtype)
        for dtype in dtypes
        for variant in DECODE_VARIANTS
    ]
