"""Forward of fused attention: online softmax over live key blocks (Dao et al. 2022, 2023).

Glossary
    Hq, Hkv, GROUP      query heads, key heads, Hq / Hkv
    TILE_M, TILE_N      queries and keys of a tile
    D0..D2, E0..E2      chunks of the query/key and of the value head dimension (0: absent)
    SUB                 key tiles of a block of the mask
    m_i, l_i, acc       running row maximum (in units of the scores), row sum, unnormalised output
    ctx                 (args, head values, row values) of a fragment, see `emit.py`
    entry               kv_block * 2 + partial, as BlockLists stores it

Parallelisation: one program a row tile of one query head. Programs are numbered so that, within a
batch of heads whose keys and values fit the L2 cache, row tiles with most live blocks start first.

Full blocks run without any masking code: one loop takes both kinds, with a branch around the mask.
Keys past KV_LEN are masked in the last block only.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import LN_2, LOG2_E, real, whole, whole32
from attnloom.backends.triton.tiles import load_tile, store_tile


@triton.jit
def load_query(q_src, at, row, cfg: tl.constexpr):
    """The chunks of a query tile; absent chunks repeat the first and are never used."""
    M: tl.constexpr = cfg.TILE_M
    q0 = load_tile(q_src[0], at, row, 0, M, cfg.D0, cfg.D, cfg).to(cfg.OPERAND)
    q1 = q0
    q2 = q0
    if cfg.D1 > 0:
        q1 = load_tile(q_src[1], at, row, cfg.D0, M, cfg.D1, cfg.D, cfg).to(cfg.OPERAND)
    if cfg.D2 > 0:
        q2 = load_tile(q_src[2], at, row, cfg.D0 + cfg.D1, M, cfg.D2, cfg.D, cfg).to(cfg.OPERAND)
    return q0, q1, q2


@triton.jit
def raw_scores(q, k_src, k_at, kv, cfg: tl.constexpr):
    """q . k^T over the chunks of D: [TILE_M, TILE_N], unscaled."""
    N: tl.constexpr = cfg.TILE_N
    k = load_tile(k_src[0], k_at, kv, 0, N, cfg.D0, cfg.D, cfg).to(cfg.OPERAND)
    s = tl.dot(q[0], k.T, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.D1 > 0:
        k = load_tile(k_src[1], k_at, kv, cfg.D0, N, cfg.D1, cfg.D, cfg).to(cfg.OPERAND)
        s = tl.dot(q[1], k.T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.D2 > 0:
        k = load_tile(k_src[2], k_at, kv, cfg.D0 + cfg.D1, N, cfg.D2, cfg.D, cfg).to(cfg.OPERAND)
        s = tl.dot(q[2], k.T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    return s


@triton.jit
def modded_scores(s, scale, score_ctx, pos, offs_n, cfg: tl.constexpr):
    """Scores after the score_mod. pos = (b, h, offs_m, q_offset, kv_offset).

    Without a score_mod they stay unscaled: exp2(s * c - m * c) with c = scale * log2(e) is one
    fused multiply-add a score, exp2(s * c - m) two operations (MAX_UNSCALED, needs scale > 0)."""
    b, h, offs_m, _, _ = pos
    if not cfg.MAX_UNSCALED:
        s = s * scale
    if cfg.HAS_SCORE:
        args, head, row = score_ctx
        s = cfg.SCORE_BODY(args, head, row, b, h, offs_m, offs_n, s)
    return s


@triton.jit
def masked_scores(s, mask_ctx, pos, offs_n, kv_len, cfg: tl.constexpr):
    """-inf where the mask is false and past the last key."""
    b, h, offs_m, q_offset, kv_offset = pos
    live = offs_n < kv_len
    if cfg.HAS_MASK:
        args, head, row = mask_ctx
        live = live & cfg.MASK_BODY(args, head, row, b, h, offs_m + q_offset, offs_n + kv_offset)
    return tl.where(live, s, float("-inf"))


@triton.jit
def exponent_scale(scale, cfg: tl.constexpr):
    """c with softmax weight exp2(c * score)."""
    if cfg.MAX_UNSCALED:
        return scale * LOG2_E
    else:
        return tl.full((), LOG2_E, cfg.ACC)


@triton.jit
def accumulate(state, s, c, v_src, v_at, kv, cfg: tl.constexpr):
    """One step of the online softmax: scores and values of a key tile into (acc0..2, m_i, l_i)."""
    N: tl.constexpr = cfg.TILE_N
    acc0, acc1, acc2, m_i, l_i = state
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_use = m_new
    if cfg.MAY_MASK or cfg.HAS_SCORE:
        # a row without a key so far would give exp2(-inf + inf)
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    if cfg.NATURAL or cfg.HUGE:
        p = tl.exp2((s - m_use[:, None]) * c)
    else:
        p = tl.exp2(s * c - (m_use * c)[:, None])
    alpha = tl.exp2((m_i - m_use) * c)
    l_i = l_i * alpha + tl.sum(p, 1)
    alpha = alpha[:, None]
    p = p.to(cfg.OPERAND)
    v = load_tile(v_src[0], v_at, kv, 0, N, cfg.E0, cfg.DV, cfg).to(cfg.OPERAND)
    acc0 = tl.dot(p, v, acc0 * alpha, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.E1 > 0:
        v = load_tile(v_src[1], v_at, kv, cfg.E0, N, cfg.E1, cfg.DV, cfg).to(cfg.OPERAND)
        acc1 = tl.dot(p, v, acc1 * alpha, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.E2 > 0:
        v = load_tile(v_src[2], v_at, kv, cfg.E0 + cfg.E1, N, cfg.E2, cfg.DV, cfg).to(cfg.OPERAND)
        acc2 = tl.dot(p, v, acc2 * alpha, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    return acc0, acc1, acc2, m_new, l_i


@triton.jit
def empty_state(ROWS: tl.constexpr, cfg: tl.constexpr):
    m_i = tl.full([ROWS], float("-inf"), cfg.ACC)
    l_i = tl.zeros([ROWS], cfg.ACC)
    acc0 = tl.zeros([ROWS, cfg.E0], cfg.ACC)
    acc1 = acc0
    acc2 = acc0
    if cfg.E1 > 0:
        acc1 = tl.zeros([ROWS, cfg.E1], cfg.ACC)
    if cfg.E2 > 0:
        acc2 = tl.zeros([ROWS, cfg.E2], cfg.ACC)
    return acc0, acc1, acc2, m_i, l_i


@triton.jit
def attend_entries(
    state, q, k_src, k_at, v_src, v_at, scale, score_ctx, mask_ctx, pos, lists, span,
    cfg: tl.constexpr,
):  # fmt: skip
    """All key tiles of list entries first .. last - 1, LAST_FIRST: the other way round. lists =
    (entries, block that overhangs or -1).

    The entry of the next step is loaded a step ahead: the address of its keys is then known when
    the copy is issued. Loaded in place it stalls every warp of the pipeline (H200, causal D128: see
    docs/log.md)."""
    entries, overhang = lists
    first, last = span
    c = exponent_scale(scale, cfg)
    begin = first
    if cfg.LAST_FIRST:
        begin = last - 1
    entry = tl.load(entries + begin, mask=first < last, other=0)
    for i in tl.range(first * cfg.SUB, last * cfg.SUB):
        t = i
        following = tl.minimum((t + 1) // cfg.SUB, last - 1)
        if cfg.LAST_FIRST:
            t = (first + last) * cfg.SUB - 1 - i
            following = tl.maximum(t - 1, first * cfg.SUB) // cfg.SUB
        block = entry >> 1
        kv = (block * cfg.SUB + t % cfg.SUB) * cfg.TILE_N
        partial = ((entry & 1) != 0) | (block == overhang)
        entry = tl.load(entries + following)
        offs_n = kv + tl.arange(0, cfg.TILE_N)[None, :]
        s = raw_scores(q, k_src, k_at, kv, cfg)
        s = modded_scores(s, scale, score_ctx, pos, offs_n, cfg)
        if partial:
            s = masked_scores(s, mask_ctx, pos, offs_n, k_at[5], cfg)
        state = accumulate(state, s, c, v_src, v_at, kv, cfg)
    return state


@triton.jit
def attend_range(
    state, q, k_src, k_at, v_src, v_at, scale, score_ctx, mask_ctx, pos, first, last,
    MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """All key tiles first .. last - 1 in order."""
    c = exponent_scale(scale, cfg)
    for t in tl.range(first, last):
        kv = t * cfg.TILE_N
        offs_n = kv + tl.arange(0, cfg.TILE_N)[None, :]
        s = raw_scores(q, k_src, k_at, kv, cfg)
        s = modded_scores(s, scale, score_ctx, pos, offs_n, cfg)
        if MASKED:
            s = masked_scores(s, mask_ctx, pos, offs_n, k_at[5], cfg)
        state = accumulate(state, s, c, v_src, v_at, kv, cfg)
    return state


@triton.jit
def locate(lists, shape, cfg: tl.constexpr):
    """(b, h, tile, first and last entry) of this program: heads in batches, longest tiles first."""
    heads, num_tiles, head_batch = whole32(shape, 0), whole32(shape, 9), whole32(shape, 27)
    pid = tl.program_id(0)
    per_batch = head_batch * num_tiles
    batch = pid // per_batch
    total = whole32(shape, 6) * heads  # B * Hq
    width = tl.minimum(total - batch * head_batch, head_batch)
    local = pid - batch * per_batch
    tile = local // width
    bh = batch * head_batch + local % width
    b = bh // heads
    h = bh % heads
    first = 0
    last = 0
    if cfg.HAS_LISTS:
        unit = b * whole32(lists, 2) + h * whole32(lists, 5)
        work = lists[1] + (unit * num_tiles + tile) * 3
        tile = tl.load(work).to(tl.int32)
        first = tl.load(work + 1)
        last = tl.load(work + 2)
    return b, h, tile, first, last


@triton.jit
def score_context(score_args, b, h, offs_m, cfg: tl.constexpr):
    if cfg.HAS_SCORE:
        head = cfg.SCORE_HEAD(score_args, b, h)
        return score_args, head, cfg.SCORE_ROW(score_args, head, b, h, offs_m)
    else:
        return score_args, 0, 0


@triton.jit
def mask_context(mask_args, b, h, positions, cfg: tl.constexpr):
    if cfg.HAS_MASK:
        head = cfg.MASK_HEAD(mask_args, b, h)
        return mask_args, head, cfg.MASK_ROW(mask_args, head, b, h, positions)
    else:
        return mask_args, 0, 0


@triton.jit(do_not_specialize=["lists", "score_args", "mask_args", "scale", "shape", "strides"])
def forward_kernel(
    q0, q1, q2, k0, k1, k2, v0, v1, v2, out, lse, max_scores, lists, score_args, mask_args, scale,
    shape, strides, cfg: tl.constexpr,
):  # fmt: skip
    """shape = (Hq, GROUP, B, row tiles, Q_LEN, KV_LEN, q_offset, kv_offset, kv batch step 0/1,
    heads of a batch, block that overhangs KV_LEN or -1); strides = batch, head and row strides of
    q, k, v, out, in elements; scale one real; all packed (packed.py). lists = (entries, work,
    batch step, head step), see lists.py. q0..v2 are the TMA descriptors of the chunks (0 where
    absent), or the same pointer three times; the launcher of Triton 3.6 takes no descriptor inside
    a tuple."""
    q_src, k_src, v_src = (q0, q1, q2), (k0, k1, k2), (v0, v1, v2)
    b, h, tile, first, last = locate(lists, shape, cfg)
    q_len, kv_len = whole32(shape, 12), whole32(shape, 15)
    q_offset, kv_offset = whole32(shape, 18), whole32(shape, 21)
    b_kv, h_kv = b * whole32(shape, 24), h // whole32(shape, 3)
    q_at = (b, h, whole(strides, 0), whole(strides, 3), whole(strides, 6), q_len)
    k_at = (b_kv, h_kv, whole(strides, 9), whole(strides, 12), whole(strides, 15), kv_len)
    v_at = (b_kv, h_kv, whole(strides, 18), whole(strides, 21), whole(strides, 24), kv_len)
    out_at = (b, h, whole(strides, 27), whole(strides, 30), whole(strides, 33), q_len)
    factor = real(scale, 0, cfg.ACC)

    row = tile * cfg.TILE_M
    offs_m = row + tl.arange(0, cfg.TILE_M)[:, None]
    pos = (b, h, offs_m, q_offset, kv_offset)
    score_ctx = score_context(score_args, b, h, offs_m, cfg)
    mask_ctx = mask_context(mask_args, b, h, offs_m + q_offset, cfg)
    q = load_query(q_src, q_at, row, cfg)
    state = empty_state(cfg.TILE_M, cfg)
    if cfg.HAS_LISTS:
        overhang = whole32(shape, 30)
        state = attend_entries(
            state, q, k_src, k_at, v_src, v_at, factor, score_ctx, mask_ctx, pos,
            (lists[0], overhang), (first, last), cfg,
        )  # fmt: skip
    elif cfg.HAS_MASK:
        state = attend_range(
            state, q, k_src, k_at, v_src, v_at, factor, score_ctx, mask_ctx, pos,
            0, tl.cdiv(kv_len, cfg.TILE_N), True, cfg,
        )  # fmt: skip
    else:
        full = kv_len // cfg.TILE_N
        state = attend_range(
            state, q, k_src, k_at, v_src, v_at, factor, score_ctx, mask_ctx, pos,
            0, full, False, cfg,
        )  # fmt: skip
        if cfg.MAY_MASK:
            state = attend_range(
                state, q, k_src, k_at, v_src, v_at, factor, score_ctx, mask_ctx, pos,
                full, tl.cdiv(kv_len, cfg.TILE_N), True, cfg,
            )  # fmt: skip

    acc0, acc1, acc2, m_i, l_i = state
    inverse = 1.0 / tl.where(l_i == 0, 1.0, l_i)[:, None]
    M: tl.constexpr = cfg.TILE_M
    store_tile(out, acc0 * inverse, out_at, row, 0, M, cfg.E0, cfg.DV, cfg.OUT_ALIGNED)
    if cfg.E1 > 0:
        store_tile(out, acc1 * inverse, out_at, row, cfg.E0, M, cfg.E1, cfg.DV, cfg.OUT_ALIGNED)
    if cfg.E2 > 0:
        column: tl.constexpr = cfg.E0 + cfg.E1
        store_tile(out, acc2 * inverse, out_at, row, column, M, cfg.E2, cfg.DV, cfg.OUT_ALIGNED)
    offs = row + tl.arange(0, cfg.TILE_M)
    at = (b * whole32(shape, 0) + h).to(tl.int64) * q_len + offs
    natural = m_i * (exponent_scale(factor, cfg) * LN_2)
    log_sum = tl.where(l_i == 0, float("-inf"), natural + tl.log(l_i))
    tl.store(lse + at, log_sum, mask=offs < q_len)
    if cfg.WANT_MAX:
        tl.store(max_scores + at, natural, mask=offs < q_len)
