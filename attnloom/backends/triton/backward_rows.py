"""dq: one program a row tile of one query head, over the live key tiles of the row.

Numbered and ordered as the forward's programs (`forward.locate`). dq stays in registers: 3 matrix
products a tile, no atomics. Glossary: backward.py.
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
from attnloom.backends.triton.forward import locate, mask_context, score_context


@triton.jit
def _row_step(
    state, q, q_from, do, do_from, stats, k_src, k_at, v_src, v_at, kv, partial, scale, contexts,
    pos, sinks, cfg: tl.constexpr,
):  # fmt: skip
    """One key tile. state = (dq chunks, sums); stats = (lse_log2, delta) as columns."""
    N: tl.constexpr = cfg.TILE_N
    dq, sums = state
    b, h, offs_m, q_offset, kv_offset = pos
    score_ctx, grad_ctx, mask_ctx = contexts
    lse_log2, delta = stats
    offs_n = kv + tl.arange(0, N)[None, :]
    k = load_chunks(k_src, k_at, kv, N, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    raw = inner(q, q_from, k, (k_src, k_at, kv), cfg.TILE_M, N, cfg.D1, cfg.D2, cfg.D, cfg)
    score, p = probabilities(raw, scale, lse_log2, score_ctx, b, h, offs_m, offs_n, cfg)
    weight = early_gradient(p, score, sums, sinks, grad_ctx, b, h, offs_m, offs_n, cfg)
    if cfg.MAY_MASK:  # noqa: SIM102 - known when the kernel is compiled, the other is not
        if partial:
            live = kept(
                mask_ctx, b, h, offs_m + q_offset, offs_n + kv_offset, offs_n < k_at[5], cfg
            )
            weight = tl.where(live, weight, 0.0)
    v = load_chunks(v_src, v_at, kv, N, cfg.E0, cfg.E1, cfg.E2, cfg.DV, cfg)
    dp = inner(do, do_from, v, (v_src, v_at, kv), cfg.TILE_M, N, cfg.E1, cfg.E2, cfg.DV, cfg)
    ds, sums = score_gradient(
        weight * (dp - delta), score, sums, sinks, grad_ctx, b, h, offs_m, offs_n, cfg
    )
    return add_product(dq, ds.to(cfg.OPERAND), k, cfg.D1, cfg.D2, cfg), sums


@triton.jit(do_not_specialize=["lists", "score_args", "mask_args", "scale", "shape", "strides"])
def row_kernel(
    q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, dq, stats, lists, score_args, mask_args, sinks,
    scale, shape, strides, cfg: tl.constexpr,
):  # fmt: skip
    """shape (and PITCH), lists, scale and sources as forward_kernel's; g0..g2 those of dout.
    strides of q, k, v, dout, dq. sinks: where `rows` fragments store, else unused."""
    b, h, tile, first, last = locate(lists, shape, cfg)
    heads, q_len, kv_len = whole32(shape, 0), whole32(shape, 12), whole32(shape, 15)
    q_offset, kv_offset = whole32(shape, 18), whole32(shape, 21)
    b_kv, h_kv = b * whole32(shape, 24), h // whole32(shape, 3)
    q_at = (b, h, whole(strides, 0), whole(strides, 3), whole(strides, 6), q_len)
    k_at = (b_kv, h_kv, whole(strides, 9), whole(strides, 12), whole(strides, 15), kv_len)
    v_at = (b_kv, h_kv, whole(strides, 18), whole(strides, 21), whole(strides, 24), kv_len)
    do_at = (b, h, whole(strides, 27), whole(strides, 30), whole(strides, 33), q_len)
    dq_at = (b, h, whole(strides, 36), whole(strides, 39), whole(strides, 42), q_len)
    k_src, v_src = (k0, k1, k2), (v0, v1, v2)
    factor = real(scale, 0, cfg.ACC)

    M: tl.constexpr = cfg.TILE_M
    row = tile * M
    offs = row + tl.arange(0, M)
    offs_m = offs[:, None]
    pitch = whole32(shape, 33)
    at = (b * heads + h).to(tl.int64) * pitch + offs
    lse_log2 = tl.load(stats + at)[:, None]
    delta = tl.load(stats + whole32(shape, 6).to(tl.int64) * heads * pitch + at)[:, None]
    pos = (b, h, offs_m, q_offset, kv_offset)
    score_ctx = score_context(score_args, b, h, offs_m, cfg)
    mask_ctx = mask_context(mask_args, b, h, offs_m + q_offset, cfg)
    grad_ctx = score_ctx
    if cfg.HAS_SCORE:
        head = cfg.GRAD_HEAD(score_args, b, h)
        grad_ctx = (score_args, head, cfg.GRAD_ROW(score_args, head, b, h, offs_m))
    contexts = (score_ctx, grad_ctx, mask_ctx)
    q = load_chunks((q0, q1, q2), q_at, row, M, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    do = load_chunks((g0, g1, g2), do_at, row, M, cfg.E0, cfg.E1, cfg.E2, cfg.DV, cfg)
    q_from, do_from = ((q0, q1, q2), q_at, row), ((g0, g1, g2), do_at, row)
    state = (zeros(M, cfg.D0, cfg.D1, cfg.D2, cfg), first_sums(M, cfg))
    if cfg.HAS_LISTS:
        entries, overhang = lists[0], whole32(shape, 30)
        # loaded a step ahead, see forward.attend_entries
        entry = tl.load(entries + first, mask=first < last, other=0)
        for t in tl.range(first * cfg.SUB, last * cfg.SUB):
            block = entry >> 1
            kv = (block * cfg.SUB + t % cfg.SUB) * cfg.TILE_N
            partial = ((entry & 1) != 0) | (block == overhang)
            entry = tl.load(entries + tl.minimum((t + 1) // cfg.SUB, last - 1))
            state = _row_step(
                state, q, q_from, do, do_from, (lse_log2, delta), k_src, k_at, v_src, v_at, kv,
                partial, factor, contexts, pos, sinks, cfg,
            )  # fmt: skip
    else:
        for t in tl.range(0, tl.cdiv(kv_len, cfg.TILE_N)):
            kv = t * cfg.TILE_N
            partial = kv + cfg.TILE_N > kv_len
            if cfg.HAS_MASK:
                partial = True
            state = _row_step(
                state, q, q_from, do, do_from, (lse_log2, delta), k_src, k_at, v_src, v_at, kv,
                partial, factor, contexts, pos, sinks, cfg,
            )  # fmt: skip
    acc, sums = state
    store_chunks(dq, acc, factor, dq_at, row, M, cfg.D0, cfg.D1, cfg.D2, cfg.D, cfg)
    if cfg.HAS_SCORE:
        args, head, rows = grad_ctx
        cfg.GRAD_FLUSH(args, sinks, head, rows, b, h, offs_m, sums, tl.program_id(0))
