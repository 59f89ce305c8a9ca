"""Decode: few queries against many keys, split over live key blocks (Dao et al. 2023,
flash-decoding).

Glossary (more in forward.py)
    row          g * Q_LEN + query, over the query heads g of one key head: all of them share its
    keys TILE_M       rows of a program; NUM_SPLITS programs share the key tiles of a row chunk
    partial_acc  [B * Hkv, splits, rows, Dv], unnormalised outputs; partial_m, partial_l likewise

Parallelisation: one program a (key head, row chunk, split); each takes an equal share of the live
key tiles, so that a sparse mask fills the device too. With one split the program writes the result
itself; otherwise a second small kernel merges the splits (merge.py). It may start beside the first,
once all programs of that have begun, and waits until they are done (OVERLAPS: 3.5 us of 134 on an
H200).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attnloom.backends.triton.device_math import LN_2, real, whole, whole32
from attnloom.backends.triton.forward import (
    accumulate,
    empty_state,
    exponent_scale,
    mask_context,
    masked_scores,
    modded_scores,
    raw_scores,
    score_context,
)
from attnloom.backends.triton.merge import row_offsets


@triton.jit
def _load_rows(
    q, offsets, inside, COL: tl.constexpr, COLS: tl.constexpr, cfg: tl.constexpr
):  # fmt: skip
    offs_c = COL + tl.arange(0, COLS)[None, :]
    mask = inside & (offs_c < cfg.D)
    return tl.load(q + offsets + offs_c, mask=mask, other=0.0).to(cfg.OPERAND)


@triton.jit
def _store_rows(
    dst, value, offsets, inside, COL: tl.constexpr, COLS: tl.constexpr, cfg: tl.constexpr
):  # fmt: skip
    offs_c = COL + tl.arange(0, COLS)[None, :]
    mask = inside & (offs_c < cfg.DV)
    tl.store(dst + offsets + offs_c, value.to(dst.dtype.element_ty), mask=mask)


@triton.jit
def _load_queries(q, offsets, inside, cfg: tl.constexpr):
    if cfg.ALIGNED:
        # said by arithmetic, as in tiles.py: loads of single elements cost registers and time
        UNIT: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
        offsets = (offsets // UNIT) * UNIT
    q0 = _load_rows(q, offsets, inside, 0, cfg.D0, cfg)
    q1 = q0
    q2 = q0
    if cfg.D1 > 0:
        q1 = _load_rows(q, offsets, inside, cfg.D0, cfg.D1, cfg)
    if cfg.D2 > 0:
        q2 = _load_rows(q, offsets, inside, cfg.D0 + cfg.D1, cfg.D2, cfg)
    return q0, q1, q2


@triton.jit
def _share(lists, b, h_kv, kv_len, split, num_splits, cfg: tl.constexpr):
    """(first entry, first and last + 1 key tile of this split, counted from that entry)."""
    first = 0
    if cfg.HAS_LISTS:
        unit = b * whole32(lists, 2) + h_kv * whole32(lists, 5)
        first = tl.load(lists[1] + unit)
        total = ((tl.load(lists[1] + unit + 1) - first) * cfg.SUB).to(tl.int32)
    else:
        total = tl.cdiv(kv_len, cfg.TILE_N)
    start = total * 0
    stop = total
    if num_splits > 1:
        each = total // num_splits
        more = total - each * num_splits
        start = each * split + tl.minimum(split, more)
        stop = start + each + (split < more).to(tl.int32)
    return first, start, stop


@triton.jit(do_not_specialize=["lists", "score_args", "mask_args", "scale", "shape", "strides"])
def decode_kernel(
    q, k0, k1, k2, v0, v1, v2, out, lse, max_scores, partial_acc, partial_m, partial_l, lists,
    score_args, mask_args, scale, shape, strides, cfg: tl.constexpr,
):  # fmt: skip
    """shape = (Hq, GROUP, row chunks, splits, Q_LEN, KV_LEN, q_offset, kv_offset, kv batch step
    0/1, block that overhangs KV_LEN or -1, Hkv); strides as in forward.py. lists = (entries,
    offsets [units + 1], batch step, head step), see lists.py."""
    if cfg.OVERLAPS:
        gdc_launch_dependents()
    k_src, v_src = (k0, k1, k2), (v0, v1, v2)
    heads, group = whole32(shape, 0), whole32(shape, 3)
    num_chunks, num_splits = whole32(shape, 6), whole32(shape, 9)
    q_len, kv_len = whole32(shape, 12), whole32(shape, 15)
    pid = tl.program_id(0)
    # The first copies wait for these divisions, each some 20 instructions long.
    unit = pid
    split = pid * 0
    chunk = pid * 0
    if num_splits > 1:
        unit = pid // num_splits
        split = pid - unit * num_splits
    if num_chunks > 1:
        rest = unit // num_chunks
        chunk = unit - rest * num_chunks
        unit = rest
    kv_heads = whole32(shape, 30)
    b = unit // kv_heads
    h_kv = unit - b * kv_heads
    b_kv = b * whole32(shape, 24)
    k_at = (b_kv, h_kv, whole(strides, 9), whole(strides, 12), whole(strides, 15), kv_len)
    v_at = (b_kv, h_kv, whole(strides, 18), whole(strides, 21), whole(strides, 24), kv_len)

    first, start, stop = _share(lists, b, h_kv, kv_len, split, num_splits, cfg)
    rows = chunk * cfg.TILE_M + tl.arange(0, cfg.TILE_M)
    num_rows = group * q_len
    inside = rows < num_rows
    clamped = tl.minimum(rows, num_rows - 1)
    h = h_kv * group + clamped
    query = clamped * 0
    if q_len > 1:
        h = h_kv * group + clamped // q_len
        query = clamped % q_len
    at_q = row_offsets(b, h, query, strides, 0)[:, None]
    q_tile = _load_queries(q, at_q, inside[:, None], cfg)
    factor = real(scale, 0, cfg.ACC)
    pos = (b, h[:, None], query[:, None], whole32(shape, 18), whole32(shape, 21))
    score_ctx = score_context(score_args, b, pos[1], pos[2], cfg)
    mask_ctx = mask_context(mask_args, b, pos[1], pos[2] + pos[3], cfg)

    overhang = whole32(shape, 27)
    state = empty_state(cfg.TILE_M, cfg)
    c = exponent_scale(factor, cfg)
    entry = 0
    if cfg.HAS_LISTS:
        entry = tl.load(lists[0] + first + start // cfg.SUB, mask=start < stop, other=0)
    for t in tl.range(start, stop):
        if cfg.HAS_LISTS:
            kv = ((entry >> 1) * cfg.SUB + t % cfg.SUB) * cfg.TILE_N
            partial = ((entry & 1) != 0) | ((entry >> 1) == overhang)
            following = tl.minimum(t + 1, stop - 1) // cfg.SUB
            entry = tl.load(lists[0] + first + following)
        else:
            kv = t * cfg.TILE_N
            partial = kv + cfg.TILE_N > kv_len
            if cfg.HAS_MASK:
                partial = True
        offs_n = kv + tl.arange(0, cfg.TILE_N)[None, :]
        s = raw_scores(q_tile, k_src, k_at, kv, cfg)
        s = modded_scores(s, factor, score_ctx, pos, offs_n, cfg)
        if cfg.MAY_MASK:  # noqa: SIM102 - one is decided when compiling, one when running
            if partial:
                s = masked_scores(s, mask_ctx, pos, offs_n, kv_len, cfg)
        state = accumulate(state, s, c, v_src, v_at, kv, cfg)

    acc0, acc1, acc2, m_i, l_i = state
    if cfg.SINGLE:
        inverse = 1.0 / tl.where(l_i == 0, 1.0, l_i)[:, None]
        target = out
        offsets = row_offsets(b, h, query, strides, 27)[:, None]
        acc0, acc1, acc2 = acc0 * inverse, acc1 * inverse, acc2 * inverse
    else:
        target = partial_acc
        at = (unit.to(tl.int64) * num_splits + split) * num_rows + rows
        offsets = (at * cfg.DV)[:, None]
    keep = inside[:, None]
    _store_rows(target, acc0, offsets, keep, 0, cfg.E0, cfg)
    if cfg.E1 > 0:
        _store_rows(target, acc1, offsets, keep, cfg.E0, cfg.E1, cfg)
    if cfg.E2 > 0:
        _store_rows(target, acc2, offsets, keep, cfg.E0 + cfg.E1, cfg.E2, cfg)
    if cfg.SINGLE:
        natural = m_i * (c * LN_2)
        at = (tl.cast(b, tl.int64) * heads + h) * q_len + query
        log_sum = tl.where(l_i == 0, float("-inf"), natural + tl.log(l_i))
        tl.store(lse + at, log_sum, mask=inside)
        if cfg.WANT_MAX:
            tl.store(max_scores + at, natural, mask=inside)
    else:
        tl.store(partial_m + at, m_i, mask=inside)
        tl.store(partial_l + at, l_i, mask=inside)
