"""Kernels of a decoder between its products. Each passes once over its tensors.

Glossary
    row     a token's numbers; C of them, or heads of D
    pair    (i, i + D / 2) of a head, turned by one angle

Numbers are widened to float32 and rounded where torch's operators round: after the sum of the
residual, after the norm and after its weight (once for both in Gemma's form), after activation and
after product. A rotation is rounded once, where torch rounds three times.

Parallelisation: a program a row (add_norm), a row and WIDTH of its numbers (gated), a row and HEADS
of its heads (rotate, append). At 32 rows each takes two to three microseconds, as long as a kernel
takes to start: what counts is how few there are.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(x, added, weight, summed, out, cfg: tl.constexpr):
    """x, added, summed, out [T, C]; weight [C]. summed is written where ADDS."""
    offs_c = tl.arange(0, cfg.BLOCK)
    mask = offs_c < cfg.C
    offs = tl.program_id(0).to(tl.int64) * cfg.C + offs_c
    wide = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    dtype = out.dtype.element_ty
    if cfg.ADDS:
        more = tl.load(added + offs, mask=mask, other=0.0).to(tl.float32)
        total = (wide + more).to(dtype)
        tl.store(summed + offs, total, mask=mask)
        wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, 0) * (1.0 / cfg.C)
    wide = wide * tl.div_rn(1.0, tl.sqrt_rn(mean + cfg.EPS))
    factor = tl.load(weight + offs_c, mask=mask, other=0.0).to(tl.float32)
    if cfg.GEMMA:
        factor = 1.0 + factor
    else:
        wide = wide.to(dtype).to(tl.float32)
    tl.store(out + offs, (wide * factor).to(dtype), mask=mask)


@triton.jit
def silu(x):
    """x sigmoid(x), rounded once: `/` alone is off by two units in the last place."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(u)) as x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return tl.div_rn(x, 1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated_kernel(gate_up, out, cfg: tl.constexpr):
    """gate_up [T, 2 C], out [T, C]."""
    num_blocks: tl.constexpr = (cfg.C + cfg.WIDTH - 1) // cfg.WIDTH
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs_c = (tl.program_id(0) % num_blocks) * cfg.WIDTH + tl.arange(0, cfg.WIDTH)
    mask = offs_c < cfg.C
    source = gate_up + row * (2 * cfg.C) + offs_c
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # [WIDTH]
    up = tl.load(source + cfg.C, mask=mask, other=0.0).to(tl.float32)  # [WIDTH]
    dtype = out.dtype.element_ty
    active = cfg.ACTIVATION(gate).to(dtype).to(tl.float32)
    tl.store(out + row * cfg.C + offs_c, (active * up).to(dtype), mask=mask)


@triton.jit
def rotate_kernel(projected, cos, sin, query, key, cfg: tl.constexpr):
    """projected [T, (HQ + 2 HKV) * D]; cos, sin [T, D / 2]; query [T, HQ, D], key [T, HKV, D]."""
    half: tl.constexpr = cfg.D // 2
    num_heads: tl.constexpr = cfg.HQ + cfg.HKV
    num_blocks: tl.constexpr = (num_heads + cfg.HEADS - 1) // cfg.HEADS
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = (tl.program_id(0) % num_blocks) * cfg.HEADS + tl.arange(0, cfg.HEADS)
    offs_i = tl.arange(0, cfg.BLOCK)
    inside = offs_i < half
    turn_cos = tl.load(cos + row * half + offs_i, mask=inside, other=0.0).to(tl.float32)[None, :]
    turn_sin = tl.load(sin + row * half + offs_i, mask=inside, other=0.0).to(tl.float32)[None, :]

    is_query = (head < cfg.HQ)[:, None] & inside[None, :]
    is_key = ((head >= cfg.HQ) & (head < num_heads))[:, None] & inside[None, :]
    offs = head[:, None] * cfg.D + offs_i[None, :]
    source = projected + row * ((num_heads + cfg.HKV) * cfg.D) + offs
    some = is_query | is_key
    first = tl.load(source, mask=some, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    second = tl.load(source + half, mask=some, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    dtype = query.dtype.element_ty
    first_turned = (first * turn_cos - second * turn_sin).to(dtype)
    second_turned = (second * turn_cos + first * turn_sin).to(dtype)

    into = query + row * (cfg.HQ * cfg.D) + offs
    tl.store(into, first_turned, mask=is_query)
    tl.store(into + half, second_turned, mask=is_query)
    into = key + row * (cfg.HKV * cfg.D) + offs - cfg.HQ * cfg.D
    tl.store(into, first_turned, mask=is_key)
    tl.store(into + half, second_turned, mask=is_key)


@triton.jit
def append_kernel(key, value, keys, values, places, cfg: tl.constexpr):
    """key [T, HKV, D]; value [T, HKV, D] with rows VALUE_ROW apart; keys, values [R, D]; places
    [T * HKV] int64, rows of both."""
    num_blocks: tl.constexpr = (cfg.HKV + cfg.HEADS - 1) // cfg.HEADS
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = (tl.program_id(0) % num_blocks) * cfg.HEADS + tl.arange(0, cfg.HEADS)
    offs_d = tl.arange(0, cfg.BLOCK)[None, :]
    exists = head < cfg.HKV
    mask = exists[:, None] & (offs_d < cfg.D)
    place = tl.load(places + row * cfg.HKV + head, mask=exists, other=0)
    into = place[:, None] * cfg.D + offs_d  # int64: places are
    offs = head[:, None] * cfg.D + offs_d
    new = tl.load(key + row * (cfg.HKV * cfg.D) + offs, mask=mask, other=0.0)  # [HEADS, BLOCK]
    tl.store(keys + into, new, mask=mask)
    new = tl.load(value + row * cfg.VALUE_ROW + offs, mask=mask, other=0.0)  # [HEADS, BLOCK]
    tl.store(values + into, new, mask=mask)
