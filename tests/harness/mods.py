"""Mods that every implementation is tested with: one row each, in the table MODS.

A row says how to draw what the mod captures and how to build the mod from it, so that the oracle
can build the same mod from float64 copies. Constants that meet positions alone are exact in
float32, where torch rounds them to; logarithmic buckets stay clear of their boundaries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness.draw import Draw, Sizes

Captures = dict[str, torch.Tensor]
ModPair = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True)
class Mod:
    """One variant of attention.

    build: (captures, sizes) -> (score_mod or None, mask_mod or None).
    draw: (sizes, draw) -> captures.
    learnable: names of captures whose gradient is checked.
    mask_axes: which of "b", "h" the mask depends on; the others are broadcast.
    """

    name: str
    build: Callable[[Captures, Sizes], ModPair]
    draw: Callable[[Sizes, Draw], Captures] = lambda sizes, draw: {}
    learnable: tuple[str, ...] = ()
    mask_axes: str = ""


MODS: dict[str, Mod] = {}


def _score(draw=None, learnable=()):
    """Register a function (captures, sizes) -> score_mod."""

    def register(make):
        row = Mod(make.__name__, lambda c, s: (make(c, s), None), learnable=learnable)
        _add(row, draw)
        return make

    return register


def _mask(draw=None, axes=""):
    """Register a function (captures, sizes) -> mask_mod."""

    def register(make):
        _add(Mod(make.__name__, lambda c, s: (None, make(c, s)), mask_axes=axes), draw)
        return make

    return register


def _pair(draw=None, learnable=(), axes=""):
    """Register a function (captures, sizes) -> (score_mod, mask_mod)."""

    def register(make):
        _add(Mod(make.__name__, make, learnable=learnable, mask_axes=axes), draw)
        return make

    return register


def _add(row: Mod, draw) -> None:
    fields = {**row.__dict__, "draw": draw} if draw else row.__dict__
    assert row.name not in MODS
    MODS[row.name] = Mod(**fields)


# --- no captures ---------------------------------------------------------------------------------


@_pair()
def plain(c, s):
    return None, None


@_score()
def alibi(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score - torch.exp2(-(h + 1) * 8.0 / s.Hq) * (q_idx - kv_idx).abs()

    return score_mod


@_score()
def softcap(c, s):
    cap = 3.0
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


@_score()
def relative_distance(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) * 0.0625


@_score()
def square_relu(c, s):
    return lambda score, b, h, q_idx, kv_idx: torch.relu(score) ** 2 - 0.5 * score


@_score()
def score_minus_inf(c, s):
    """Causal masking by the score_mod alone."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))


@_score()
def ternary(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * 2 if q_idx >= kv_idx else score - 1


@_score()
def if_statement(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        if h == 0:
            return score
        if q_idx - kv_idx > 5 and kv_idx % 2 == 0:
            score = score * 0.5
        return score - 0.25

    return score_mod


@_score()
def builtin_min_max(c, s):
    return lambda score, b, h, q_idx, kv_idx: max(min(score, 1.5), -1.0) + 0.25 * score


@_score()
def t5_buckets_by_log(c, s):
    """Distance bucket by logarithm, as a plain function of the positions."""

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        steps = torch.log(distance.clamp(min=1) / 8.0) / math.log(16.0) * 8 + 1e-3
        far = 8 + steps.to(torch.int64)
        bucket = torch.where(distance < 8, distance, far.clamp(max=15))
        return score + bucket * 0.125

    return score_mod


# --- captured, learnable ------------------------------------------------------------------------


@_score(lambda s, d: {"slope": d.uniform(0.01, 0.3, s.Hq)}, learnable=("slope",))
def head_slope(c, s):
    return lambda score, b, h, q_idx, kv_idx: score - c["slope"][h] * (q_idx - kv_idx).abs()


@_score(lambda s, d: {"bias": d.normal(s.Hq, 2 * s.reach - 1)}, learnable=("bias",))
def relative_bias(c, s):
    shift = s.reach - 1
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][h, q_idx - kv_idx + shift]


@_score(lambda s, d: {"bias": d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def full_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][b, h, q_idx, kv_idx]


@_score(lambda s, d: {"bias": d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def chained_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][b][h][q_idx, kv_idx]


@_score(lambda s, d: {"bias": d.normal(s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def pair_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][q_idx, kv_idx]


@_score(
    lambda s, d: {"row": d.uniform(0.5, 1.5, s.Hq, s.Q_LEN), "column": d.normal(s.KV_LEN)},
    learnable=("row", "column"),
)
def row_and_column(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * c["row"][h, q_idx] + c["column"][kv_idx]

    return score_mod


@_score(lambda s, d: {"temperature": d.uniform(0.7, 0.8)}, learnable=("temperature",))
def temperature(c, s):
    return lambda score, b, h, q_idx, kv_idx: score / c["temperature"]


@_score(lambda s, d: {"cap": d.uniform(1.0, 3.0, s.Hq)}, learnable=("cap",))
def learned_softcap(c, s):
    return lambda score, b, h, q_idx, kv_idx: c["cap"][h] * torch.tanh(score / c["cap"][h])


@_score(lambda s, d: {"table": d.normal(32, s.Hq)}, learnable=("table",))
def t5_bias(c, s):
    """Raffel et al. 2020: buckets by distance, one learned bias for each bucket and head."""

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        sign = torch.where(distance > 0, 16, 0)
        distance = distance.abs()
        ratio = torch.log(distance.clamp(min=1).to(torch.float32) / 8) / math.log(128 / 8)
        far = torch.clamp(8 + (ratio * 8 + 1e-3).to(torch.int64), max=15)
        return score + c["table"][sign + torch.where(distance < 8, distance, far), h]

    return score_mod


@_score(
    lambda s, d: {"alpha": d.normal(s.Hq, 6), "beta": d.uniform(0.2, 2.0, s.Hq, 6)},
    learnable=("alpha", "beta"),
)
def rbf_bias(c, s):
    """A sum over captured rows: radial basis functions of the distance."""

    def score_mod(score, b, h, q_idx, kv_idx):
        x = (q_idx - kv_idx) / 16.0
        return score + (c["alpha"][h] * torch.exp(-c["beta"][h] * x * x)).sum()

    return score_mod


@_score(lambda s, d: {"u": d.normal(s.Q_LEN, 5), "w": d.normal(s.KV_LEN, 5)}, learnable=("u", "w"))
def low_rank_dot(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + 0.3 * (c["u"][q_idx] * c["w"][kv_idx]).sum()


@_score(lambda s, d: {"p": d.normal(s.reach)}, learnable=("p",))
def captured_twice(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * c["p"][q_idx] + c["p"][kv_idx] ** 2


@_score(lambda s, d: {"p": d.normal(s.Hq)}, learnable=("p",))
def host_expression(c, s):
    """`exp(p)` does not depend on the score: it runs once, and its gradient must still flow."""
    return lambda score, b, h, q_idx, kv_idx: score * torch.exp(c["p"])[h]


@_score(lambda s, d: {"p": d.normal(s.KV_LEN, s.Hq)}, learnable=("p",))
def transposed_view(c, s):
    view = c["p"].t()
    return lambda score, b, h, q_idx, kv_idx: score + view[h, kv_idx]


@_score(lambda s, d: {"p": d.normal(1, s.Q_LEN, 1)}, learnable=("p",))
def expanded_view(c, s):
    view = c["p"].expand(s.Hq, s.Q_LEN, s.KV_LEN)
    return lambda score, b, h, q_idx, kv_idx: score * (1 + view[h, q_idx, kv_idx])


@_score(lambda s, d: {"p": d.normal(s.Hq, 2 * s.KV_LEN + 1)}, learnable=("p",))
def sliced_view(c, s):
    view = c["p"][:, 1::2]
    return lambda score, b, h, q_idx, kv_idx: score + view[h, kv_idx]


@_score(lambda s, d: {"p": d.normal(s.Hq, s.KV_LEN, dtype=torch.bfloat16)}, learnable=("p",))
def bfloat16_capture(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["p"][h, kv_idx]


@_score(lambda s, d: {"p": d.normal(s.Hq, s.KV_LEN, dtype=torch.float16)}, learnable=("p",))
def float16_capture(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + c["p"][h, kv_idx])


@_score(
    lambda s, d: {"gate": d.normal(s.Hq), "ids": d.integers(0, 5, s.KV_LEN)}, learnable=("gate",)
)
def sigmoid_gate(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(c["gate"][h]) + torch.where(c["ids"][kv_idx] > 2, 0.5, 0.0)

    return score_mod


@_score(
    lambda s, d: {"scale": d.uniform(0.5, 2.0, s.Hq), "t": d.normal()}, learnable=("scale", "t")
)
def partial_function(c, s):
    def score_mod(score, b, h, q_idx, kv_idx, scale, t):
        return score * scale[h] + t * (kv_idx % 3)

    return functools.partial(score_mod, scale=c["scale"], t=c["t"])


@_score(lambda s, d: {"weight": d.normal(s.Hq)}, learnable=("weight",))
def bound_method(c, s):
    class Bias:
        def __init__(self, weight):
            self.weight = weight

        def score_mod(self, score, b, h, q_idx, kv_idx):
            angle = (q_idx - kv_idx).to(self.weight.dtype) * 0.3
            return score + self.weight[h] * torch.cos(angle)

    return Bias(c["weight"]).score_mod


@_score(lambda s, d: {"p": d.normal(s.B, s.Hq)}, learnable=("p",))
def batch_head_gain(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + 0.5 * torch.sin(c["p"][b, h]))


# --- captured, not learnable ---------------------------------------------------------------------


@_score(lambda s, d: {"table": d.integers(-5, 6, s.reach, dtype=torch.int8)})
def int8_table(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + 0.125 * c["table"][(q_idx - kv_idx).abs()]

    return score_mod


@_score(lambda s, d: {"table": d.integers(0, 200, s.KV_LEN, dtype=torch.uint8)})
def uint8_table(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["table"][kv_idx] / 64.0


@_score(lambda s, d: {"keep": d.flags(0.7, s.Q_LEN, s.KV_LEN)})
def bool_table_score(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(c["keep"][q_idx, kv_idx], score, score - 2.0)

    return score_mod


@_score(lambda s, d: {"order": d.integers(0, s.KV_LEN, s.KV_LEN), "bias": d.normal(s.KV_LEN)})
def indirect_lookup(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][c["order"][kv_idx]]


@_score(lambda s, d: {"bias": d.normal(s.Hq, s.KV_LEN)})
def negative_index(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][h, -1 - kv_idx]


# --- masks ---------------------------------------------------------------------------------------


@_mask()
def causal(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@_mask()
def causal_lower_right(c, s):
    offset = s.KV_LEN - s.Q_LEN
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


@_mask()
def sliding_window(c, s):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


@_mask()
def window_with_sinks(c, s):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= 20) | (kv_idx < 4))

    return mask_mod


@_mask()
def prefix_or(c, s):
    """Prefix-LM as tutorials write it, with Python's `or`."""
    return lambda b, h, q_idx, kv_idx: kv_idx < 17 or q_idx >= kv_idx


@_mask(lambda s, d: {"ids": d.documents(s.reach, 5)})
def document(c, s):
    return lambda b, h, q_idx, kv_idx: c["ids"][q_idx] == c["ids"][kv_idx]


@_mask(lambda s, d: {"ids": d.integers(0, 4, s.B, s.reach)}, axes="b")
def document_unsorted_per_batch(c, s):
    def mask_mod(b, h, q_idx, kv_idx):
        return (c["ids"][b, q_idx] == c["ids"][b, kv_idx]) & (q_idx >= kv_idx)

    return mask_mod


@_mask(lambda s, d: {"length": d.integers(0, s.KV_LEN + 1, s.B)}, axes="b")
def key_padding(c, s):
    return lambda b, h, q_idx, kv_idx: kv_idx < c["length"][b]


@_mask(lambda s, d: {"start": d.integers(0, max(s.Q_LEN // 2, 1), s.B)}, axes="b")
def left_padding(c, s):
    """Hides whole query rows: those rows have no key."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx >= c["start"][b])

    return mask_mod


@_mask(axes="h")
def dilated_by_head(c, s):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0


@_mask()
def natten_2d(c, s):
    """Neighbourhood attention on a canvas of width 8 with a 5 x 5 window held inside the canvas."""
    width, height = 8, max(s.reach // 8, 1)

    def mask_mod(b, h, q_idx, kv_idx):
        qx, qy = q_idx % width, q_idx // width
        kx, ky = kv_idx % width, kv_idx // width
        cx, cy = qx.clamp(2, width - 3), qy.clamp(min(2, height - 1), max(height - 3, 0))
        return ((cx - kx).abs() <= 2) & ((cy - ky).abs() <= 2)

    return mask_mod


@_mask(lambda s, d: {"keep": d.flags(0.5, s.B, s.Q_LEN, s.KV_LEN)}, axes="b")
def bool_table_mask(c, s):
    return lambda b, h, q_idx, kv_idx: c["keep"][b, q_idx, kv_idx]


@_mask()
def nothing(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx < 0


@_mask()
def every_second_row(c, s):
    return lambda b, h, q_idx, kv_idx: q_idx % 2 == 1


@_mask()
def block_diffusion(c, s):
    """Noisy half, clean half; blocks of 8 (Arriola et al. 2025, arXiv:2503.09573)."""
    half = max(s.reach // 2, 1)

    def mask_mod(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= half, kv_idx >= half
        q_block = torch.where(q_clean, q_idx - half, q_idx) // 8
        kv_block = torch.where(kv_clean, kv_idx - half, kv_idx) // 8
        own = (q_block == kv_block) & (q_clean == kv_clean)
        offset = (q_block > kv_block) & kv_clean & ~q_clean
        return own | offset | ((q_block >= kv_block) & kv_clean & q_clean)

    return mask_mod


# --- both ----------------------------------------------------------------------------------------


@_pair(
    lambda s, d: {"bias": d.normal(s.Hq, 2 * 24 + 1), "ids": d.documents(s.reach, 3)},
    learnable=("bias",),
)
def document_relative_softcap(c, s):
    """A learned bias inside a window, which the mask keeps the index within."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return 4.0 * torch.tanh((score + c["bias"][h, q_idx - kv_idx + 24]) / 4.0)

    def mask_mod(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() <= 24
        return near & (q_idx >= kv_idx) & (c["ids"][q_idx] == c["ids"][kv_idx])

    return score_mod, mask_mod


@_pair(lambda s, d: {"slope": d.uniform(0.01, 0.3, s.Hq)}, learnable=("slope",))
def causal_head_slope(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + c["slope"][h] * (kv_idx - q_idx)

    return score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@_pair(
    lambda s, d: {"p": d.uniform(0.1, 1.0, s.reach), "shared": d.integers(0, 3, s.reach)},
    learnable=("p",),
)
def same_capture_in_score_and_mask(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * c["p"][kv_idx] + c["shared"][kv_idx] * 0.125

    def mask_mod(b, h, q_idx, kv_idx):
        return c["shared"][q_idx] == c["shared"][kv_idx]

    return score_mod, mask_mod


@_pair(lambda s, d: {"slope": d.uniform(0.5, 2.0, s.Hq)}, learnable=("slope",))
def singular_where_masked(c, s):
    """log(q - kv) has no value, and no derivative, where the mask is false."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - c["slope"][h] * torch.log((q_idx - kv_idx).to(c["slope"].dtype))

    return score_mod, lambda b, h, q_idx, kv_idx: q_idx > kv_idx
