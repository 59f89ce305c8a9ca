"""Mask mods of the mask tests, each made for given sizes, and their dense truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskMod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    Q: int
    KV: int

    @property
    def longest(self) -> int:
        return max(self.Q, self.KV)


def dense(mod: MaskMod, s: Sizes) -> torch.Tensor:
    """[B, H, Q, KV] bool by one broadcast call; mods here need no tracing for that."""
    b = torch.arange(s.B)[:, None, None, None]
    h = torch.arange(s.H)[:, None, None]
    q, kv = torch.arange(s.Q)[:, None], torch.arange(s.KV)
    return mod(b, h, q, kv).expand(s.B, s.H, s.Q, s.KV).contiguous()


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sorted_ids(s: Sizes, rows: int = 1) -> torch.Tensor:
    """[rows, longest] ids of uneven packed documents."""
    steps = torch.rand(rows, s.longest, generator=drawn(1)) < 6 / s.longest
    return steps.cumsum(1)


def causal(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: q >= kv


def window(s: Sizes) -> MaskMod:
    width = max(1, s.longest // 5)
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= width)


def narrow_band(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (q - kv).abs() <= 3


def prefix(s: Sizes) -> MaskMod:
    length = s.KV // 3
    return lambda b, h, q, kv: (kv < length) | (q >= kv)


def documents(s: Sizes) -> MaskMod:
    ids = sorted_ids(s)[0]
    return lambda b, h, q, kv: ids[q] == ids[kv]


def causal_documents_by_batch(s: Sizes) -> MaskMod:
    ids = sorted_ids(s, s.B)
    return lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)


def shuffled_documents(s: Sizes) -> MaskMod:
    ids = torch.randint(0, 3, (s.longest,), generator=drawn(2))
    return lambda b, h, q, kv: ids[q] == ids[kv]


def windows_by_head(s: Sizes) -> MaskMod:
    widths = torch.tensor([1, s.longest // 4, s.longest // 2, s.longest])
    return lambda b, h, q, kv: (q - kv).abs() < widths[h]


def padding(s: Sizes) -> MaskMod:
    lengths = torch.randint(0, s.KV + 1, (s.B,), generator=drawn(3))
    return lambda b, h, q, kv: kv < lengths[b]


def strided(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (q - kv) % 7 == 0


def rare(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (q * 131 + kv * 17) % 1999 == 5


def almost_all(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: (q * 131 + kv * 17) % 1999 != 5


def dense_table(s: Sizes) -> MaskMod:
    table = torch.rand(s.H, s.Q, s.KV, generator=drawn(4)) < 0.001
    return lambda b, h, q, kv: table[h, q, kv]


def noop(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: q >= 0


def nothing(s: Sizes) -> MaskMod:
    return lambda b, h, q, kv: q < 0


def image_neighbours(s: Sizes) -> MaskMod:
    side = max(1, int(s.longest**0.5))
    return lambda b, h, q, kv: (
        ((q // side - kv // side).abs() <= 2) & ((q % side - kv % side).abs() <= 2)
    )


def equal_heads(s: Sizes) -> MaskMod:
    shift = torch.zeros(max(s.H, 1), dtype=torch.int64)
    return lambda b, h, q, kv: q >= kv + shift[h]


def float_distance(s: Sizes) -> MaskMod:
    positions = torch.rand(s.longest, generator=drawn(5)).cumsum(0)
    return lambda b, h, q, kv: (positions[q] - positions[kv]).abs() < 20.0


def float_with_nan(s: Sizes) -> MaskMod:
    positions = torch.rand(s.longest, generator=drawn(6)).cumsum(0)
    positions[:: max(1, s.longest // 3)] = torch.nan
    return lambda b, h, q, kv: positions[q] >= positions[kv]


MODS = [
    causal,
    window,
    narrow_band,
    prefix,
    documents,
    causal_documents_by_batch,
    shuffled_documents,
    windows_by_head,
    padding,
    strided,
    rare,
    almost_all,
    dense_table,
    noop,
    nothing,
    image_neighbours,
    equal_heads,
    float_distance,
    float_with_nan,
]
