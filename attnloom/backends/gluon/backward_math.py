"""What a consumer of the backward computes on its tile of scores between the matrix products.

Scores are transposed, [HALF, TILE_M]: keys by queries, so that fragments are called with QX = 0, a
vector of keys has SliceLayout(1, L) and one of queries SliceLayout(0, L). Glossary:
backward_shared.py and backends/triton/backward.py.

    context      (b, h, score, mask, grad), the last three (args, head, column) of their fragments
    slope        derivative of the score_mod where it does not depend on dscore: computed with the
                 score, so that the score needs no registers while the next products run
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.backward_shared import HALF
from attnloom.backends.triton.device_math import LOG2_E


@gluon.jit
def exp2_fast(x):
    """2**x; results below 2**-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def contexts(score_args, mask_args, b, h, keys, kv_offset, cfg: gl.constexpr):
    """What fragments know of a head and of a consumer's keys."""
    score = (score_args, 0, 0)
    grad = score
    mask = (mask_args, 0, 0)
    if cfg.HAS_SCORE:
        head = cfg.SCORE_HEAD(score_args, b, h)
        score = (score_args, head, cfg.SCORE_COLUMN(score_args, head, b, h, keys))
        head = cfg.GRAD_HEAD(score_args, b, h)
        grad = (score_args, head, cfg.GRAD_COLUMN(score_args, head, b, h, keys))
    if cfg.HAS_MASK:
        head = cfg.MASK_HEAD(mask_args, b, h)
        column = cfg.MASK_COLUMN(mask_args, head, b, h, keys + kv_offset)
        mask = (mask_args, head, column)
    return b, h, score, mask, grad


@gluon.jit
def modified(s, context, sinks, queries, keys, factor, cfg: gl.constexpr):
    """(score in base 2, what `dscores` needs of it) of raw products."""
    if cfg.HAS_SCORE:
        b, h, score_ctx, _, grad_ctx = context
        score = s * factor
        args, head, column = score_ctx
        row = cfg.SCORE_ROW(args, head, b, h, queries)
        value = cfg.SCORE_BODY(args, head, row, column, b, h, queries, keys, score, 0)
        rest = score
        if cfg.SLOPE_FIRST:
            args, head, column = grad_ctx
            row = cfg.GRAD_ROW(args, head, b, h, queries)
            one = gl.full(s.shape, 1.0, gl.float32, s.type.layout)
            slope, _ = cfg.GRAD_BODY(
                args, sinks, head, row, column, b, h, queries, keys, score, one, (0.0,), 0
            )
            rest = slope.to(cfg.SLOPE)
        return value * LOG2_E, rest
    else:
        # one fused multiply-add with the subtraction of lse
        return s * (factor * LOG2_E), 0


@gluon.jit
def masked(p, context, queries, keys, offsets, kv_len, cfg: gl.constexpr):
    """p where the mask holds and keys exist, else 0. offsets: of the mask's positions."""
    if cfg.HAS_MASK:
        b, h, _, mask_ctx, _ = context
        args, head, column = mask_ctx
        q, kv = queries + offsets[0], keys + offsets[1]
        row = cfg.MASK_ROW(args, head, b, h, q)
        p = gl.where(cfg.MASK_BODY(args, head, row, column, b, h, q, kv, 0), p, 0.0)
    if cfg.HAS_TAIL:
        p = gl.where((keys < kv_len)[:, None], p, 0.0)
    return p


@gluon.jit
def dscores(p, dp, rest, sums, context, sinks, queries, keys, cfg: gl.constexpr):
    """(dL/d(score before the mod), the sums with this tile's contributions). dp: less delta."""
    ds = p * dp
    if cfg.HAS_SCORE:
        if cfg.SLOPE_FIRST:
            grad = ds * rest.to(gl.float32)
        else:
            b, h, _, _, grad_ctx = context
            args, head, column = grad_ctx
            row = cfg.GRAD_ROW(args, head, b, h, queries)
            grad, sums = cfg.GRAD_BODY(
                args, sinks, head, row, column, b, h, queries, keys, rest, ds, sums, 0
            )
        if cfg.FINITE_SLOPE:
            ds = grad.to(gl.float32)
        else:
            # a derivative may be infinite where nothing is propagated
            ds = gl.where(ds != 0, grad.to(gl.float32), 0.0)
    return ds, sums


@gluon.jit
def first_sums(LAYOUT: gl.constexpr, cfg: gl.constexpr):
    if cfg.HAS_SINKS:
        return cfg.GRAD_BEGIN(HALF, LAYOUT)
    else:
        return (0.0,)
