"""dk and dv: one program a key tile of one key head, over the query heads of its group and their
live rows.

Scores are kept transposed, [TILE_N, TILE_M], so that p and dscore are left operands of dv and dk
and never leave registers. Fragments are emitted with q and kv exchanged: what depends on keys alone
is computed once a head. Glossary: backward.py.

Programs are numbered as the forward's: within a batch of heads that share the L2 cache, key tiles
with most live rows first. A unit is one (batch entry, query head) that reads a program's keys;
where key and value have a batch of one, every batch entry is among them. PARTS > 1 deals units to
several programs, each with dk and dv of its own, for shapes with few key tiles (summed in order by
the launcher).
"""

import triton
import triton.language as tl

from attnloom.backends.triton.backward import (
    add_product,
    early_gradient,
    first_sums,
    inner,
    kept,
    load_chunks,
    probabilities,
    score_gradient,
    store_chunks,
    zeros,
)
from attnloom.backends.triton.device_math import real, whole, whole32


@triton.jit
def _row_values(stats, pos, row, WHICH: tl.constexpr, cfg: tl.constexpr):
    """lse_log2 (0) or delta (1) of a step's rows: [1, TILE_M]. Loaded into the layout of a tile's
    columns by threads they cost 32 copies of 4 bytes a thread, and the registers to address them;
    by TMA none."""
    bh, num_heads, pitch = pos
    line = bh + WHICH * num_heads
    if cfg.STATS_BY_TMA:
        return stats.load([line, row])
    else:
        # said by arithmetic that rows are aligned, see tiles.py
        start = line.to(tl.int64) * ((pitch // 16) * 16) + row
        return tl.load(stats + (start + tl.arange(0, cfg.TILE_M)))[None, :]


@triton.jit
def _key_step(
    state, k, k_from, v, v_from, q_src, q_at, do_src, do_at, stats, row, partial, scale, contexts,
    pos, sinks, cfg: tl.constexpr,
):  # fmt: skip
    """One query tile. state = (dk chunks, dv chunks, sums); stats = (lse_log2, delta) of the
    head."""
    M: tl.constexpr = cfg.TILE_M
    dk, dv, sums = state
    b, h, line, offs_n, q_offset, kv_offset, kv_len = pos
    score_ctx, grad_ctx, mask_ctx = contexts
    offs = row + tl.arange(0, M)
    offs_m = offs[None, :]
    q = load_chunks(q_src, q_at, row, M, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    raw = inner(k, k_from, q, (q_src, q_at, row), cfg.TILE_N, M, cfg.D1, cfg.D2, cfg.D, cfg)
    lse_log2 = _row_values(stats, line, row, 0, cfg)
    score, p = probabilities(raw, scale, lse_log2, score_ctx, b, h, offs_n, offs_m, cfg)
    weight = early_gradient(p, score, sums, sinks, grad_ctx, b, h, offs_n, offs_m, cfg)
    if cfg.MAY_MASK:  # noqa: SIM102 - known when the kernel is compiled, the other is not
        if partial:
            live = kept(mask_ctx, b, h, offs_n + kv_offset, offs_m + q_offset, offs_n < kv_len, cfg)
            p = tl.where(live, p, 0.0)
            weight = tl.where(live, weight, 0.0)
    do = load_chunks(do_src, do_at, row, M, cfg.E0, cfg.E1, cfg.E2, cfg.DV, cfg)
    if cfg.WANT_DV:
        dv = add_product(dv, p.to(cfg.OPERAND), do, cfg.E1, cfg.E2, cfg)
    if cfg.WANT_DK:
        delta = _row_values(stats, line, row, 1, cfg)
        dp = inner(v, v_from, do, (do_src, do_at, row), cfg.TILE_N, M, cfg.E1, cfg.E2, cfg.DV, cfg)
        ds, sums = score_gradient(
            weight * (dp - delta), score, sums, sinks, grad_ctx, b, h, offs_n, offs_m, cfg
        )
        dk = add_product(dk, ds.to(cfg.OPERAND), q, cfg.D1, cfg.D2, cfg)
    return dk, dv, sums


@triton.jit
def _contexts(score_args, mask_args, b, h, offs_n, kv_offset, cfg: tl.constexpr):
    score_ctx = (score_args, 0, 0)
    grad_ctx = score_ctx
    mask_ctx = (mask_args, 0, 0)
    if cfg.HAS_SCORE:
        head = cfg.SCORE_HEAD(score_args, b, h)
        score_ctx = (score_args, head, cfg.SCORE_ROW(score_args, head, b, h, offs_n))
        head = cfg.GRAD_HEAD(score_args, b, h)
        grad_ctx = (score_args, head, cfg.GRAD_ROW(score_args, head, b, h, offs_n))
    if cfg.HAS_MASK:
        head = cfg.MASK_HEAD(mask_args, b, h)
        mask_ctx = (mask_args, head, cfg.MASK_ROW(mask_args, head, b, h, offs_n + kv_offset))
    return score_ctx, grad_ctx, mask_ctx


@triton.jit
def _locate(lists, shape, cfg: tl.constexpr):
    """(b_kv, h_kv, part, tile, first unit, last unit) of this program."""
    heads_kv, group, parts = whole32(shape, 3), whole32(shape, 6), whole32(shape, 33)
    num_tiles, units, head_batch = whole32(shape, 18), whole32(shape, 30), whole32(shape, 27)
    pid = tl.program_id(0)
    per_batch = head_batch * num_tiles
    batch = pid // per_batch
    total = whole32(shape, 36)  # Bkv * Hkv * parts
    width = tl.minimum(total - batch * head_batch, head_batch)
    local = pid - batch * per_batch
    tile = local // width
    index = batch * head_batch + local % width
    part = index % parts
    b_kv, h_kv = index // parts // heads_kv, index // parts % heads_kv
    first, last = part * units // parts, (part + 1) * units // parts
    if cfg.HAS_LISTS:
        b = b_kv + first // group
        h = h_kv * group + first % group
        unit = b * whole32(lists, 3) + h * whole32(lists, 6)
        tile = tl.load(lists[2] + (unit * num_tiles + tile) * 3).to(tl.int32)
    return b_kv, h_kv, part, tile, first, last


@triton.jit(do_not_specialize=["lists", "score_args", "mask_args", "scale", "shape", "strides"])
def key_kernel(
    q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, dk, dv, stats, lists, score_args, mask_args,
    sinks, scale, shape, strides, cfg: tl.constexpr,
):  # fmt: skip
    """shape = (Hq, Hkv, GROUP, Q_LEN, KV_LEN, B, key tiles, q_offset, kv_offset, heads of a batch,
    units of a key head, parts, Bkv * Hkv * parts, Bkv, PITCH); strides of q, k, v, dout, dk, dv;
    lists = (offsets, entries, work, batch step, head step, key blocks) of the transposed mask;
    g0..g2 sources of dout; sinks as emit_grad.py's. dk and dv have parts * Bkv batch entries."""
    heads, group = whole32(shape, 0), whole32(shape, 6)
    q_len, kv_len = whole32(shape, 9), whole32(shape, 12)
    q_offset, kv_offset = whole32(shape, 21), whole32(shape, 24)
    b_kv, h_kv, part, tile, first_unit, last_unit = _locate(lists, shape, cfg)
    N: tl.constexpr = cfg.TILE_N
    start = tile * N
    offs_n = start + tl.arange(0, N)[:, None]
    k_at = (b_kv, h_kv, whole(strides, 9), whole(strides, 12), whole(strides, 15), kv_len)
    v_at = (b_kv, h_kv, whole(strides, 18), whole(strides, 21), whole(strides, 24), kv_len)
    k = load_chunks((k0, k1, k2), k_at, start, N, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    v = load_chunks((v0, v1, v2), v_at, start, N, cfg.E0, cfg.E1, cfg.E2, cfg.DV, cfg)
    k_from, v_from = ((k0, k1, k2), k_at, start), ((v0, v1, v2), v_at, start)
    acc_k = zeros(N, cfg.D0, cfg.D1, cfg.D2, cfg)
    acc_v = zeros(N, cfg.E0, cfg.E1, cfg.E2, cfg)
    q_src, do_src = (q0, q1, q2), (g0, g1, g2)
    factor = real(scale, 0, cfg.ACC)
    num_heads, pitch = whole32(shape, 15) * heads, whole32(shape, 42)
    overhangs = start + N > kv_len
    for unit in range(first_unit, last_unit):
        b = b_kv + unit // group
        h = h_kv * group + unit % group
        bh = b * heads + h
        q_at = (b, h, whole(strides, 0), whole(strides, 3), whole(strides, 6), q_len)
        do_at = (b, h, whole(strides, 27), whole(strides, 30), whole(strides, 33), q_len)
        pos = (b, h, (bh, num_heads, pitch), offs_n, q_offset, kv_offset, kv_len)
        contexts = _contexts(score_args, mask_args, b, h, offs_n, kv_offset, cfg)
        state = (acc_k, acc_v, first_sums(N, cfg))
        if cfg.HAS_LISTS:
            at = (b * whole32(lists, 3) + h * whole32(lists, 6)) * whole32(lists, 9)
            at += tile // cfg.TILES_PER_BLOCK
            first, last = tl.load(lists[0] + at), tl.load(lists[0] + at + 1)
            # loaded a step ahead, see forward.attend_entries
            entry = tl.load(lists[1] + first, mask=first < last, other=0)
            for t in tl.range(first * cfg.SUB, last * cfg.SUB):
                row = ((entry >> 1) * cfg.SUB + t % cfg.SUB) * cfg.TILE_M
                partial = ((entry & 1) != 0) | overhangs
                entry = tl.load(lists[1] + tl.minimum((t + 1) // cfg.SUB, last - 1))
                state = _key_step(
                    state, k, k_from, v, v_from, q_src, q_at, do_src, do_at, stats, row, partial,
                    factor, contexts, pos, sinks, cfg,
                )  # fmt: skip
        else:
            for t in tl.range(0, tl.cdiv(q_len, cfg.TILE_M)):
                partial = overhangs
                if cfg.HAS_MASK:
                    partial = True
                state = _key_step(
                    state, k, k_from, v, v_from, q_src, q_at, do_src, do_at, stats, t * cfg.TILE_M,
                    partial, factor, contexts, pos, sinks, cfg,
                )  # fmt: skip
        acc_k, acc_v, sums = state
        if cfg.HAS_SCORE and cfg.WANT_DK:
            args, head, columns = contexts[1]
            cfg.GRAD_FLUSH(args, sinks, head, columns, b, h, offs_n, sums, 0)
    b_out = b_kv + part * whole32(shape, 39)  # Bkv
    if cfg.WANT_DK:
        dk_at = (b_out, h_kv, whole(strides, 36), whole(strides, 39), whole(strides, 42), kv_len)
        store_chunks(dk, acc_k, factor, dk_at, start, N, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    if cfg.WANT_DV:
        dv_at = (b_out, h_kv, whole(strides, 45), whole(strides, 48), whole(strides, 51), kv_len)
        store_chunks(dv, acc_v, 1.0, dv_at, start, N, cfg.E0, cfg.E1, cfg.E2, cfg.DV, cfg)
