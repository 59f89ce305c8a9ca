"""What a consumer of the backward computes on its tile of scores between the matrix products.

Scores are transposed, [HALF, TILE_M]: keys by queries, so that fragments are called with QX = 0, a
vector of keys has SliceLayout(1, L) and one of queries SliceLayout(0, L). Glossary:
backward_shared.py and backends/triton/backward.py.

    context      (b, h, score, mask, grad, bias), the last four of their fragments: (args, head,
                 column), but for the bias (args, head, what it adds by key from the first key on)
    first        (query, key), the first ones of a consumer's tile
    pieces       what the score_mod and its derivative look up for each score, see pieces.py
    x            scores in the units that exponents are taken in: p = 2**(x * base - lse_log2), see
                 score_form.py
    slope        derivative of the inner score_mod, where nothing but the score has a gradient
    weight       p, times the slope if there is one: dscore = weight * (dp - delta), so that scores
                 need no registers while dP is waited for
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_shared import HALF
from attnloom.backends.gluon.builtins import exp2_fast
from attnloom.backends.gluon.rings import get, slot_of


@gluon.jit
def contexts(score_args, mask_args, b, h, keys, first, kv_offset, cfg: gl.constexpr):
    """What fragments know of a head and of a consumer's keys, the first of them `first`."""
    score = (score_args, 0, 0)
    grad = score
    bias = score
    mask = (mask_args, 0, 0)
    if cfg.HAS_SCORE:
        head = cfg.SCORE_HEAD(score_args, b, h)
        score = (score_args, head, cfg.SCORE_COLUMN(score_args, head, b, h, keys))
        head = cfg.GRAD_HEAD(score_args, b, h)
        grad = (score_args, head, cfg.GRAD_COLUMN(score_args, head, b, h, keys))
    if cfg.HAS_BIAS:
        head = cfg.BIAS_HEAD(score_args, b, h)
        slope = cfg.BIAS_SLOPE(score_args, head, b, h)
        bias = (score_args, head, (keys - first).to(gl.float32) * slope)
    if cfg.HAS_MASK:
        head = cfg.MASK_HEAD(mask_args, b, h)
        column = cfg.MASK_COLUMN(mask_args, head, b, h, keys + kv_offset)
        mask = (mask_args, head, column)
    return b, h, score, mask, grad, bias


@gluon.jit
def subtrahend(lse_log2, context, queries, first, base, cfg: gl.constexpr):
    """What exponents are less than x * base: lse, less what a bias adds by query."""
    if cfg.HAS_BIAS:
        b, h, _, _, _, bias = context
        args, head, _ = bias
        lse_log2 = lse_log2 - cfg.BIAS_AT(args, head, b, h, queries, first) * base
    return lse_log2


@gluon.jit
def look_up(context, first, cfg: gl.constexpr):
    """The pieces of a step; asked for before its products are waited for."""
    if cfg.HAS_SCORE:
        b, h, score_ctx, _, grad_ctx, _ = context
        args, head, _ = score_ctx
        score = cfg.SCORE_PIECES(args, head, b, h, first[0], first[1], cfg.TILE_M, 0)
        args, head, _ = grad_ctx
        grad = cfg.GRAD_PIECES(args, head, b, h, first[0], first[1], cfg.TILE_M, 0)
        return score, grad
    else:
        return (0,), (0,)


@gluon.jit
def modified(s, context, sinks, pieces, first, queries, keys, factor, cfg: gl.constexpr):
    """(x, the slope or, if not SLOPE_FIRST, the score before the mod) of raw products."""
    b, h, score_ctx, _, grad_ctx, bias = context
    rest = 0.0
    if not cfg.UNSCALED:
        s = s * factor
    if cfg.HAS_SCORE:
        rest = s
        if cfg.SLOPE_FIRST:
            args, head, column = grad_ctx
            row = cfg.GRAD_ROW(args, head, b, h, queries)
            one = gl.full(s.shape, 1.0, gl.float32, s.type.layout)
            rest, _ = cfg.GRAD_BODY(
                args, sinks, head, row, column, pieces[1], first, b, h, queries, keys, s, one,
                (0.0,), 0,
            )  # fmt: skip
        args, head, column = score_ctx
        row = cfg.SCORE_ROW(args, head, b, h, queries)
        s = cfg.SCORE_BODY(args, head, row, column, b, h, queries, keys, pieces[0], s, 0)
    if cfg.HAS_BIAS:
        s = s + bias[2][:, None]
    return s, rest


@gluon.jit
def queries_of(mem, slot, L: gl.constexpr, cfg: gl.constexpr):
    """(queries of a step, the first one, whether the mask is to be applied)."""
    queries = gl.arange(0, cfg.TILE_M, gl.SliceLayout(0, L))
    partial, row = False, 0
    if cfg.NEEDS_QUERIES:
        tag = get(mem.tags.index(slot))
        row = tag >> 1
        queries += row
        partial = (tag & 1) != 0
    return queries, row, partial


@gluon.jit
def rows_ahead(context, row, q_offset, cfg: gl.constexpr):
    """What the mask looks up by query, once a thread group: ROWS_APART. Asked for early."""
    if cfg.ROWS_APART:
        b, h, _, mask_ctx, _, _ = context
        args, head, _ = mask_ctx
        FEW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        q = gl.arange(0, cfg.TILE_M, FEW) + (row + q_offset)
        return cfg.MASK_ROW(args, head, b, h, q)
    else:
        return (0,)


@gluon.jit
def hidden(s, context, rows, row, queries, keys, partial, numbers, cfg: gl.constexpr):
    """Raw scores, those that the mask leaves out -inf; MASK_FIRST."""
    if cfg.MASK_FIRST:
        if partial:
            _, _, kv_len, _, q_offset, kv_offset = numbers
            s = masked(
                s, float("-inf"), context, rows, row, queries, keys, (q_offset, kv_offset), kv_len,
                cfg,
            )  # fmt: skip
    return s


@gluon.jit
def probabilities(
    s, context, sinks, pieces, corner, mem, n, rows, queries, keys, partial, numbers,
    cfg: gl.constexpr,
):  # fmt: skip
    """(p, as `modified`) of the raw scores of step n. numbers = (factor, base, KV_LEN, the
    consumer's first key, q_offset, kv_offset)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    factor, base, kv_len, first, q_offset, kv_offset = numbers
    x, rest = modified(s, context, sinks, pieces, corner, queries, keys, factor, cfg)
    exponent = x * base
    if not cfg.FOLD:
        less = mem.lse.index(slot_of(n, cfg)).load(gl.SliceLayout(0, L))
        less = subtrahend(less, context, queries, first, base, cfg)
        exponent = exponent - less[None, :]
    p = exp2_fast(exponent)
    if cfg.MAY_MASK and not cfg.MASK_FIRST:
        if partial:
            p = masked(
                p, 0.0, context, rows, corner[0], queries, keys, (q_offset, kv_offset), kv_len, cfg
            )
    return p, rest


@gluon.jit
def less_delta(dp, mem, slot, L: gl.constexpr, cfg: gl.constexpr):
    """dP of a step less delta, which FOLD has begun from."""
    if not cfg.FOLD:
        dp = dp - mem.delta.index(slot).load(gl.SliceLayout(0, L))[None, :]
    return dp


@gluon.jit
def weighted(p, slope, cfg: gl.constexpr):
    """The weight of probabilities."""
    if cfg.SLOPE_FIRST:
        weight = p * slope
        if not cfg.FINITE_SLOPE:
            # a derivative may be infinite where nothing is propagated
            weight = gl.where(p != 0, weight, 0.0)
        p = weight
    return p


@gluon.jit
def masked(
    p, less: gl.constexpr, context, rows, first, queries, keys, offsets, kv_len, cfg: gl.constexpr
):
    """p where the mask holds and keys exist, else `less`. first: query. offsets: of the mask's
    positions."""
    if cfg.HAS_MASK:
        b, h, _, mask_ctx, _, _ = context
        args, head, column = mask_ctx
        q, kv = queries + offsets[0], keys + offsets[1]
        if cfg.ROWS_APART:
            row = bi.laid_out(rows, queries.type.layout)
        else:
            row = cfg.MASK_ROW(args, head, b, h, q)
        edges = cfg.MASK_EDGES(args, head, column, b, h, kv, first + offsets[0], 0, False)
        place = gl.arange(0, cfg.TILE_M, queries.type.layout)
        keep = cfg.MASK_BODY(args, head, row, column, edges, b, h, q, kv, place, 0, False)
        p = gl.where(keep, p, less)
    if cfg.HAS_TAIL:
        p = gl.where((keys < kv_len)[:, None], p, less)
    return p


@gluon.jit
def dscores(
    weight, dp, score, sums, context, sinks, pieces, first, queries, keys, cfg: gl.constexpr
):
    """(dL/d(score before the mod) but for constant factors, the sums with this tile's
    contributions). dp: less delta."""
    ds = weight * dp
    if cfg.HAS_SCORE and not cfg.SLOPE_FIRST:
        b, h, _, _, grad_ctx, _ = context
        args, head, column = grad_ctx
        row = cfg.GRAD_ROW(args, head, b, h, queries)
        grad, sums = cfg.GRAD_BODY(
            args, sinks, head, row, column, pieces[1], first, b, h, queries, keys, score, ds, sums,
            0,
        )  # fmt: skip
        grad = grad.to(gl.float32)
        if not cfg.FINITE_SLOPE:
            grad = gl.where(ds != 0, grad, 0.0)
        ds = grad
    return ds, sums


@gluon.jit
def first_sums(LAYOUT: gl.constexpr, cfg: gl.constexpr):
    if cfg.HAS_SINKS:
        return cfg.GRAD_BEGIN(HALF, LAYOUT)
    else:
        return (0.0,)
