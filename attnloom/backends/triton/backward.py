"""What the kernels of the backward share: chunked products, probabilities, and the preprocess.

Backward of fused attention by recomputation (Dao et al. 2022, 2023). backward_keys.py owns key
tiles (dk, dv), backward_rows.py owns row tiles (dq): 7 matrix products a tile and no atomics, so
that the three are bitwise the same from run to run. (dq added to memory by the key kernel, in 2
products less, was slower: docs/log.md.)

Glossary, beyond forward.py's
    p            probabilities exp2(score_log2 - lse_log2); 0 where a score is masked. NATURAL:
                 exp2((score - lse) * log2(e)), where the rounding of large scores cancels, for one
                 operation more, which products by multiply-adds hide
    dp           dout . v^T
    delta        rowsum(out * dout) - dlse, so that dscore = p * (dp - delta)
    stats        [2, B * Hq, PITCH]: lse_log2 = lse * log2(e) (NATURAL: lse), then delta; PITCH is
                 Q_LEN in whole tiles, so that loads need no mask. Rows without keys and rows past
                 Q_LEN have lse_log2 = +inf, hence p = 0, without a mask either
    sums, sinks  what gradients of captured tensors carry and where they go, see emit_grad.py
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import FAR, LOG2_E, whole, whole32
from attnloom.backends.triton.tiles import load_tile, store_tile

COLUMNS = tl.constexpr(64)  # of dq's memory at a time


@triton.jit
def load_chunks(
    src, at, row, ROWS: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    WIDTH: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """The chunks of a [ROWS, WIDTH] tile; absent chunks repeat the first and are never used."""
    x0 = load_tile(src[0], at, row, 0, ROWS, C0, WIDTH, cfg).to(cfg.OPERAND)
    x1 = x0
    x2 = x0
    if C1 > 0:
        x1 = load_tile(src[1], at, row, C0, ROWS, C1, WIDTH, cfg).to(cfg.OPERAND)
    if C2 > 0:
        x2 = load_tile(src[2], at, row, C0 + C1, ROWS, C2, WIDTH, cfg).to(cfg.OPERAND)
    return x0, x1, x2


@triton.jit
def inner(
    a, a_from, b, b_from, ROWS: tl.constexpr, COLS: tl.constexpr, C1: tl.constexpr,
    C2: tl.constexpr, WIDTH: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """a . b^T over chunks of the shared dimension. a_from, b_from: (sources, at, first row).

    Products by fused multiply-adds (SLICE > 0) hold both operands in registers, and spill kilobytes
    at a shared dimension of 128: they load slices of it again."""
    if cfg.SLICE > 0:
        s = tl.zeros([ROWS, COLS], cfg.ACC)
        for c in tl.static_range(0, WIDTH, cfg.SLICE):
            x = load_tile(a_from[0][0], a_from[1], a_from[2], c, ROWS, cfg.SLICE, WIDTH, cfg)
            y = load_tile(b_from[0][0], b_from[1], b_from[2], c, COLS, cfg.SLICE, WIDTH, cfg)
            s = tl.dot(
                x.to(cfg.OPERAND), y.to(cfg.OPERAND).T, s,
                input_precision=cfg.PRECISION, out_dtype=cfg.ACC,
            )  # fmt: skip
    else:
        s = tl.dot(a[0], b[0].T, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
        if C1 > 0:
            s = tl.dot(a[1], b[1].T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
        if C2 > 0:
            s = tl.dot(a[2], b[2].T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    return s


@triton.jit
def add_product(acc, p, x, C1: tl.constexpr, C2: tl.constexpr, cfg: tl.constexpr):
    """acc + p . x for every chunk of x's columns."""
    acc0, acc1, acc2 = acc
    acc0 = _plus(acc0, p, x[0], cfg)
    if C1 > 0:
        acc1 = _plus(acc1, p, x[1], cfg)
    if C2 > 0:
        acc2 = _plus(acc2, p, x[2], cfg)
    return acc0, acc1, acc2


@triton.jit
def _plus(acc, p, x, cfg: tl.constexpr):
    """acc + p . x. Products by fused multiply-adds (SLICE > 0) are summed up before they are added:
    one sum over all keys, or queries, is off by a third more."""
    if cfg.SLICE > 0:
        # zero, as grids are lines: from one that it knows Triton makes the other form again
        start = tl.zeros_like(acc) + tl.program_id(1).to(cfg.ACC)
        part = tl.dot(p, x, start, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
        return acc + part
    else:
        return tl.dot(p, x, acc, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)


@triton.jit
def zeros(
    ROWS: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, cfg: tl.constexpr
):
    acc0 = tl.zeros([ROWS, C0], cfg.ACC)
    acc1 = acc0
    acc2 = acc0
    if C1 > 0:
        acc1 = tl.zeros([ROWS, C1], cfg.ACC)
    if C2 > 0:
        acc2 = tl.zeros([ROWS, C2], cfg.ACC)
    return acc0, acc1, acc2


@triton.jit
def store_chunks(
    dst, acc, factor, at, row, ROWS: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    C2: tl.constexpr, WIDTH: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """acc * factor to rows row .. row + ROWS."""
    store_tile(dst, acc[0] * factor, at, row, 0, ROWS, C0, WIDTH, cfg.OUT_ALIGNED)
    if C1 > 0:
        store_tile(dst, acc[1] * factor, at, row, C0, ROWS, C1, WIDTH, cfg.OUT_ALIGNED)
    if C2 > 0:
        store_tile(dst, acc[2] * factor, at, row, C0 + C1, ROWS, C2, WIDTH, cfg.OUT_ALIGNED)


@triton.jit
def probabilities(raw, scale, lse_log2, ctx, b, h, offs_0, offs_1, cfg: tl.constexpr):
    """(score before the mod, p) of a tile whose rows are offs_0 and columns offs_1, unmasked.

    Fragments are emitted for that orientation: offs_0 takes the place of their q."""
    score = raw * scale
    modded = score
    if cfg.HAS_SCORE:
        args, head, row = ctx
        modded = cfg.SCORE_BODY(args, head, row, b, h, offs_0, offs_1, score)
    if cfg.NATURAL:
        log2 = (modded - lse_log2) * LOG2_E
    elif cfg.HAS_SCORE:
        log2 = modded * LOG2_E - lse_log2
    else:
        log2 = raw * (scale * LOG2_E) - lse_log2  # one fused multiply-add
    return score, tl.exp2(log2)


@triton.jit
def kept(ctx, b, h, offs_0, offs_1, inside, cfg: tl.constexpr):
    """Whether the mask holds and `inside` does. Positions are the mask's."""
    if cfg.HAS_MASK:
        args, head, row = ctx
        inside = inside & cfg.MASK_BODY(args, head, row, b, h, offs_0, offs_1)
    return inside


@triton.jit
def early_gradient(p, score, sums, sinks, ctx, b, h, offs_0, offs_1, cfg: tl.constexpr):
    """p, or with EARLY what dscore / (dp - delta) becomes before the mod.

    The derivative by the score is linear in dscore. Applied to p already, it needs neither the
    score nor what the mod left of it while the two products after it run: 32 registers a thread
    for soft-capping."""
    if cfg.EARLY:
        args, head, row = ctx
        p, sums = cfg.GRAD_BODY(args, sinks, head, row, b, h, offs_0, offs_1, score, p, sums)
    return p


@triton.jit
def score_gradient(ds, score, sums, sinks, ctx, b, h, offs_0, offs_1, cfg: tl.constexpr):
    """dL/d(score before the mod), and the sums with this tile's contributions."""
    if cfg.HAS_SCORE and not cfg.EARLY:
        args, head, row = ctx
        grad, sums = cfg.GRAD_BODY(args, sinks, head, row, b, h, offs_0, offs_1, score, ds, sums)
        # a derivative may be infinite where nothing is propagated
        ds = tl.where(ds != 0, tl.cast(grad, cfg.ACC), 0.0)
    return ds, sums


@triton.jit
def first_sums(ROWS: tl.constexpr, cfg: tl.constexpr):
    if cfg.HAS_SCORE:
        return cfg.GRAD_BEGIN(ROWS)
    else:
        return (tl.full((), 0.0, cfg.ACC),)


@triton.jit(do_not_specialize=["shape", "strides"])
def delta_kernel(out, dout, dlse, lse, stats, dq_sum, shape, strides, cfg: tl.constexpr):
    """stats of one row tile, and zeros in as many lines of CLEARED columns where dq will be added
    up. shape = (Hq, Q_LEN, PITCH, B * Hq); strides of out, dout; packed."""
    heads, q_len, pitch = whole32(shape, 0), whole32(shape, 3), whole32(shape, 6)
    tiles = pitch // cfg.TILE_M
    pid = tl.program_id(0)
    row = (pid % tiles) * cfg.TILE_M
    bh = pid // tiles
    b, h = bh // heads, bh % heads
    out_at = (b, h, whole(strides, 0), whole(strides, 3), whole(strides, 6), q_len)
    dout_at = (b, h, whole(strides, 9), whole(strides, 12), whole(strides, 15), q_len)
    products = tl.zeros([cfg.TILE_M, cfg.CHUNK], cfg.ACC)
    for c in tl.static_range(0, cfg.DV, cfg.CHUNK):
        o = load_tile(out, out_at, row, c, cfg.TILE_M, cfg.CHUNK, cfg.DV, cfg)
        g = load_tile(dout, dout_at, row, c, cfg.TILE_M, cfg.CHUNK, cfg.DV, cfg)
        products += o.to(cfg.ACC) * g.to(cfg.ACC)
    delta = tl.sum(products, 1)
    offs = row + tl.arange(0, cfg.TILE_M)
    at = bh.to(tl.int64) * q_len + offs
    to = bh.to(tl.int64) * pitch + offs
    live = offs < q_len
    if cfg.HAS_DLSE:
        delta -= tl.load(dlse + at, mask=live, other=0.0)
    natural = tl.load(lse + at, mask=live, other=float("-inf"))
    unit: tl.constexpr = 1.0 if cfg.NATURAL else LOG2_E
    dead = natural == float("-inf")
    if not cfg.NATURAL:
        # rows that a score_mod made of nothing else: their lse is their maximum alone, which does
        # not tell their weights, and times log2(e) may be past all numbers
        dead = dead | (tl.abs(natural) >= FAR)
    lse_log2 = tl.where(dead, float("inf"), natural * unit)
    tl.store(stats + to, lse_log2)
    tl.store(stats + whole(shape, 9) * pitch + to, delta)
    for c in tl.static_range(0, cfg.CLEARED, COLUMNS):
        columns = c + tl.arange(0, COLUMNS)[None, :]
        nothing = tl.zeros([cfg.TILE_M, COLUMNS], cfg.ACC)
        place = dq_sum + (to[:, None] * cfg.CLEARED + columns)
        tl.store(place, nothing, mask=columns < cfg.CLEARED)
