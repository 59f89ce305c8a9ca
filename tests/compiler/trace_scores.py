"""score_mods of the table: elementwise functions, types, captures and control flow."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.compiler.trace_table import KV_LEN, Q_LEN, B, H, draw, ints, score


@score
def identity():
    return lambda s, b, h, q, kv: s


@score
def constant():
    return lambda s, b, h, q, kv: 0.5


@score
def alibi():
    slopes = torch.tensor([0.5, 0.25])
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q)


@score
def alibi_computed():
    n = 2
    return lambda s, b, h, q, kv: s - (q - kv).abs() * 2.0 ** (-8.0 * (h + 1) / n)


@score
def softcap():
    cap = 20.0
    return lambda s, b, h, q, kv: cap * torch.tanh(s / cap)


@score
def masked_by_where():
    return lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf"))


@score
def relative_bias():
    table, reach = draw(H, 2 * KV_LEN - 1), KV_LEN - 1
    return lambda s, b, h, q, kv: s + table[h, q - kv + reach]


@score
def relative_bias_negative_index():
    table = draw(H, 2 * KV_LEN + 3)
    return lambda s, b, h, q, kv: s + table[h, q - kv]


@score
def relative_bias_clamped():
    table = draw(H, 5)
    return lambda s, b, h, q, kv: s + table[h, torch.clamp(q - kv, -2, 2) + 2]


@score
def t5_buckets():
    table, buckets, reach = draw(8, H), 8, 16

    def mod(s, b, h, q, kv):
        distance = torch.clamp(q - kv, min=0)
        exact = buckets // 2
        scaled = torch.log(distance.float() / exact) / math.log(reach / exact) * (buckets - exact)
        far = torch.minimum(exact + scaled.nan_to_num(neginf=0.0).long(), torch.tensor(buckets - 1))
        return s + table[torch.where(distance < exact, distance, far), h]

    return mod


@score
def full_bias():
    bias = draw(B, H, Q_LEN, KV_LEN)
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv]


@score
def full_bias_chained():
    bias = draw(B, H, Q_LEN, KV_LEN)
    return lambda s, b, h, q, kv: s + bias[b][h][q][kv]


@score
def full_bias_mixed_chain():
    bias = draw(B, H, Q_LEN, KV_LEN)
    return lambda s, b, h, q, kv: s + bias[b, :, q][h, ..., kv] + bias[1, h, :, kv][q]


@score
def expanded_and_transposed():
    bias = draw(KV_LEN, Q_LEN).T.expand(B, H, Q_LEN, KV_LEN)
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv]


@score
def strided_view():
    table = draw(H, 4, KV_LEN)[:, ::2]
    return lambda s, b, h, q, kv: s * table[h, 1, kv]


@score
def sliced_inside():
    table = draw(H, 2 * KV_LEN)
    return lambda s, b, h, q, kv: s + table[h, 2:][kv] + table[:, :6][h, q] + table[h, ::2][q]


@score
def scalar_capture():
    temperature = torch.tensor(1.7)
    return lambda s, b, h, q, kv: s / temperature


@score
def function_of_captures():
    log_slope, bias = draw(H), draw(KV_LEN, H)
    return lambda s, b, h, q, kv: s * torch.exp(log_slope)[h] + bias.T[h, kv] + bias[:, 0][q]


@score
def half_captures():
    a, c = draw(H, dtype=torch.float16), draw(KV_LEN, dtype=torch.bfloat16)
    return lambda s, b, h, q, kv: s * a[h].float() + c[kv].float()


@score
def double_capture():
    bias = draw(KV_LEN, dtype=torch.float64)
    return lambda s, b, h, q, kv: s + bias[kv]


@score
def integer_tables():
    a = ints(H, high=5).to(torch.int8)
    c = ints(KV_LEN, high=200).to(torch.uint8)
    return lambda s, b, h, q, kv: s * a[h] + c[kv] - a[h] * c[kv] + (c[kv] + 100)


@score
def bool_arithmetic():
    flag = torch.tensor([True, False])
    return lambda s, b, h, q, kv: s + flag[h] * 2 + (flag[h] + (q > kv)) + (q == kv)


@score
def integer_division():
    return lambda s, b, h, q, kv: (
        s + (q - kv) // 2 + (q - kv) % 3 + (q - kv) / 4 + 7 // (kv + 1) + 7 % (q + 1) + 1 / (kv + 1)
    )


@score
def division_modes():
    return lambda s, b, h, q, kv: (
        torch.div(q - kv, 2, rounding_mode="trunc")
        + torch.div(s, 0.5, rounding_mode="floor")
        + torch.fmod(q - kv, 3)
        + torch.remainder(s, 0.7)
    )


@score
def powers():
    return lambda s, b, h, q, kv: (
        s**2 + s**3 + (s * s + 1) ** 0.5 + (s * s + 1) ** -0.5 + (q - kv) ** 2 + (s * s + 1) ** 1.3
        + 2**kv + torch.pow(1.5, h) + (kv + 1.0) ** h + (s * s + 1) ** -1
    )  # fmt: skip


@score
def exotic_functions():
    return lambda s, b, h, q, kv: (
        F.gelu(s) + F.gelu(s, approximate="tanh") + F.silu(s) + F.softplus(s) + F.relu(s)
        + F.leaky_relu(s) + F.elu(s) + F.logsigmoid(s) + F.mish(s) + F.softsign(s) + F.hardtanh(s)
        + torch.logaddexp(s, h - 0.5) + torch.hypot(s, q + 1.0) + torch.lerp(s, s * 2, 0.3)
        + torch.square(s) + torch.sign(s) + torch.frac(s) + torch.erf(s) + torch.sigmoid(s)
        + torch.expm1(s) + torch.log1p(s.abs()) + torch.rsqrt(s.abs() + 1) + torch.atan2(s, q + 1.0)
        + torch.special.expit(s) + torch.clamp(s, max=0.3) + s.clamp_min(-0.2) + torch.log10(kv + 1)
    )  # fmt: skip


@score
def rounding():
    return lambda s, b, h, q, kv: (
        torch.floor(s) + s.ceil() + torch.round(s * 3) + torch.trunc(s * 2) + kv.floor()
    )


@score
def casts():
    return lambda s, b, h, q, kv: (
        (s * 4).long() + s.to(torch.int32) + s.double().float() + (s > 0).to(s.dtype) + q.type_as(s)
        + kv.to(torch.float64) + s.to(q) + (s * 3).int().bool().float()
    )  # fmt: skip


@score
def method_where_and_fill():
    return lambda s, b, h, q, kv: s.where(q >= kv, -1.0) + s.masked_fill(kv == 1, 3.0)


@score
def python_min_max():
    return lambda s, b, h, q, kv: s + max(q, kv) - min(q, kv, 3) + abs(q - kv)


@score
def ternary():
    slope = torch.tensor([0.1, 0.3])
    return lambda s, b, h, q, kv: s + (slope[h] if q >= kv else 0) - (1 if kv == 0 else 2.5)


@score
def branches_of_mixed_types():
    def mod(s, b, h, q, kv):
        if kv == q:
            return 0
        if kv > q:
            return q - kv
        return s.double()

    return mod


@score
def default_arguments():
    weights = torch.tensor([1.0, 2.0])

    def mod(s, b, h, q, kv, scale=0.5, *, table=weights):
        return s * scale * table[h]

    return mod


_GLOBAL_SLOPES = torch.tensor([0.3, 0.6])
_GLOBAL_SCALE = 1.25


@score
def module_globals():
    return lambda s, b, h, q, kv: s * _GLOBAL_SCALE + _GLOBAL_SLOPES[h] * (kv - q)


class _Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor([0.4, 0.2]))
        self.table = torch.nn.Embedding(KV_LEN, H)
        torch.nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, s, b, h, q, kv):
        return s + self.slope[h] * (q - kv) + F.embedding(kv, self.table.weight)[h]


@score
def module_method():
    return _Bias().forward


@score
def module_itself():
    return _Bias()


@score
def dict_of_tensors():
    tables = {"near": draw(KV_LEN), "far": draw(KV_LEN, seed=1)}
    return lambda s, b, h, q, kv: s + torch.where(q > kv, tables["near"][kv], tables["far"][kv])


@score
def nested_mods():
    slopes, cap = torch.tensor([0.5, 0.25]), 5.0

    def inner(s, b, h, q, kv):
        return s + slopes[h] * (kv - q)

    def outer(s, b, h, q, kv):
        return cap * torch.tanh(inner(s, b, h, q, kv) / cap)

    return outer


@score
def gathers():
    table, flat = draw(H, KV_LEN), draw(KV_LEN)
    return lambda s, b, h, q, kv: (
        s + torch.take(flat, kv) + torch.gather(table[h], 0, kv) + table.select(0, h)[q]
        + flat.index_select(0, kv).sum() + torch.take(table, h * KV_LEN + q)
    )  # fmt: skip
