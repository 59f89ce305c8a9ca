"""Rows of MODS that change scores: plain, capturing constants, capturing what is learned."""

from __future__ import annotations

import functools
import math

import torch

from tests.harness.table import pair_row, score_row


@pair_row()
def plain(c, s):
    return None, None


@score_row()
def alibi(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score - torch.exp2(-(h + 1) * 8.0 / s.Hq) * (q_idx - kv_idx).abs()

    return score_mod


@score_row()
def softcap(c, s):
    cap = 3.0
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


@score_row()
def relative_distance(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) * 0.0625


@score_row()
def square_relu(c, s):
    return lambda score, b, h, q_idx, kv_idx: torch.relu(score) ** 2 - 0.5 * score


@score_row()
def score_minus_inf(c, s):
    """Causal masking by the score_mod alone."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))


@score_row()
def ternary(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * 2 if q_idx >= kv_idx else score - 1


@score_row()
def if_statement(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        if h == 0:
            return score
        if q_idx - kv_idx > 5 and kv_idx % 2 == 0:
            score = score * 0.5
        return score - 0.25

    return score_mod


@score_row()
def builtin_min_max(c, s):
    return lambda score, b, h, q_idx, kv_idx: max(min(score, 1.5), -1.0) + 0.25 * score


@score_row()
def t5_buckets_by_log(c, s):
    """Distance bucket by logarithm, as a plain function of the positions."""

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        steps = torch.log(distance.clamp(min=1) / 8.0) / math.log(16.0) * 8 + 1e-3
        far = 8 + steps.to(torch.int64)
        bucket = torch.where(distance < 8, distance, far.clamp(max=15))
        return score + bucket * 0.125

    return score_mod


@score_row(lambda s, d: {"slope": d.uniform(0.01, 0.3, s.Hq)}, learnable=("slope",))
def head_slope(c, s):
    return lambda score, b, h, q_idx, kv_idx: score - c["slope"][h] * (q_idx - kv_idx).abs()


@score_row(lambda s, d: {"bias": d.normal(s.Hq, 2 * s.reach - 1)}, learnable=("bias",))
def relative_bias(c, s):
    shift = s.reach - 1
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][h, q_idx - kv_idx + shift]


@score_row(lambda s, d: {"bias": d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def full_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][b, h, q_idx, kv_idx]


@score_row(lambda s, d: {"bias": d.normal(s.B, s.Hq, s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def chained_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][b][h][q_idx, kv_idx]


@score_row(lambda s, d: {"bias": d.normal(s.Q_LEN, s.KV_LEN)}, learnable=("bias",))
def pair_bias(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][q_idx, kv_idx]


@score_row(
    lambda s, d: {"row": d.uniform(0.5, 1.5, s.Hq, s.Q_LEN), "column": d.normal(s.KV_LEN)},
    learnable=("row", "column"),
)
def row_and_column(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * c["row"][h, q_idx] + c["column"][kv_idx]

    return score_mod


@score_row(lambda s, d: {"temperature": d.uniform(0.7, 0.8)}, learnable=("temperature",))
def temperature(c, s):
    return lambda score, b, h, q_idx, kv_idx: score / c["temperature"]


@score_row(lambda s, d: {"cap": d.uniform(1.0, 3.0, s.Hq)}, learnable=("cap",))
def learned_softcap(c, s):
    return lambda score, b, h, q_idx, kv_idx: c["cap"][h] * torch.tanh(score / c["cap"][h])


@score_row(lambda s, d: {"table": d.normal(32, s.Hq)}, learnable=("table",))
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


@score_row(
    lambda s, d: {"alpha": d.normal(s.Hq, 6), "beta": d.uniform(0.2, 2.0, s.Hq, 6)},
    learnable=("alpha", "beta"),
)
def rbf_bias(c, s):
    """A sum over captured rows: radial basis functions of the distance."""

    def score_mod(score, b, h, q_idx, kv_idx):
        x = (q_idx - kv_idx) / 16.0
        return score + (c["alpha"][h] * torch.exp(-c["beta"][h] * x * x)).sum()

    return score_mod


@score_row(
    lambda s, d: {"u": d.normal(s.Q_LEN, 5), "w": d.normal(s.KV_LEN, 5)}, learnable=("u", "w")
)
def low_rank_dot(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + 0.3 * (c["u"][q_idx] * c["w"][kv_idx]).sum()


@score_row(lambda s, d: {"p": d.uniform(-1.5, 1.5, s.reach)}, learnable=("p",))
def captured_twice(c, s):
    """The squares stay small: where one key takes nearly all of a row, a gradient is what two
    roundings leave of each other, whatever computes it."""
    return lambda score, b, h, q_idx, kv_idx: score * c["p"][q_idx] + c["p"][kv_idx] ** 2


@score_row(lambda s, d: {"p": d.normal(s.Hq)}, learnable=("p",))
def host_expression(c, s):
    """`exp(p)` does not depend on the score: it runs once, and its gradient must still flow."""
    return lambda score, b, h, q_idx, kv_idx: score * torch.exp(c["p"])[h]


@score_row(lambda s, d: {"p": d.normal(s.KV_LEN, s.Hq)}, learnable=("p",))
def transposed_view(c, s):
    view = c["p"].t()
    return lambda score, b, h, q_idx, kv_idx: score + view[h, kv_idx]


@score_row(lambda s, d: {"p": d.normal(1, s.Q_LEN, 1)}, learnable=("p",))
def expanded_view(c, s):
    view = c["p"].expand(s.Hq, s.Q_LEN, s.KV_LEN)
    return lambda score, b, h, q_idx, kv_idx: score * (1 + view[h, q_idx, kv_idx])


@score_row(lambda s, d: {"p": d.normal(s.Hq, 2 * s.KV_LEN + 1)}, learnable=("p",))
def sliced_view(c, s):
    view = c["p"][:, 1::2]
    return lambda score, b, h, q_idx, kv_idx: score + view[h, kv_idx]


@score_row(lambda s, d: {"p": d.normal(s.Hq, s.KV_LEN, dtype=torch.bfloat16)}, learnable=("p",))
def bfloat16_capture(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["p"][h, kv_idx]


@score_row(lambda s, d: {"p": d.normal(s.Hq, s.KV_LEN, dtype=torch.float16)}, learnable=("p",))
def float16_capture(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + c["p"][h, kv_idx])


@score_row(
    lambda s, d: {"gate": d.normal(s.Hq), "ids": d.integers(0, 5, s.KV_LEN)}, learnable=("gate",)
)
def sigmoid_gate(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(c["gate"][h]) + torch.where(c["ids"][kv_idx] > 2, 0.5, 0.0)

    return score_mod


@score_row(
    lambda s, d: {"scale": d.uniform(0.5, 2.0, s.Hq), "t": d.normal()}, learnable=("scale", "t")
)
def partial_function(c, s):
    def score_mod(score, b, h, q_idx, kv_idx, scale, t):
        return score * scale[h] + t * (kv_idx % 3)

    return functools.partial(score_mod, scale=c["scale"], t=c["t"])


@score_row(lambda s, d: {"weight": d.normal(s.Hq)}, learnable=("weight",))
def bound_method(c, s):
    class Bias:
        def __init__(self, weight):
            self.weight = weight

        def score_mod(self, score, b, h, q_idx, kv_idx):
            angle = (q_idx - kv_idx).to(self.weight.dtype) * 0.3
            return score + self.weight[h] * torch.cos(angle)

    return Bias(c["weight"]).score_mod


@score_row(lambda s, d: {"p": d.normal(s.B, s.Hq)}, learnable=("p",))
def batch_head_gain(c, s):
    return lambda score, b, h, q_idx, kv_idx: score * (1 + 0.5 * torch.sin(c["p"][b, h]))


@score_row(lambda s, d: {"table": d.integers(-5, 6, s.reach, dtype=torch.int8)})
def int8_table(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + 0.125 * c["table"][(q_idx - kv_idx).abs()]

    return score_mod


@score_row(lambda s, d: {"table": d.integers(0, 200, s.KV_LEN, dtype=torch.uint8)})
def uint8_table(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["table"][kv_idx] / 64.0


@score_row(lambda s, d: {"keep": d.flags(0.7, s.Q_LEN, s.KV_LEN)})
def bool_table_score(c, s):
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(c["keep"][q_idx, kv_idx], score, score - 2.0)

    return score_mod


@score_row(lambda s, d: {"order": d.integers(0, s.KV_LEN, s.KV_LEN), "bias": d.normal(s.KV_LEN)})
def indirect_lookup(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][c["order"][kv_idx]]


@score_row(lambda s, d: {"bias": d.normal(s.Hq, s.KV_LEN)})
def negative_index(c, s):
    return lambda score, b, h, q_idx, kv_idx: score + c["bias"][h, -1 - kv_idx]
