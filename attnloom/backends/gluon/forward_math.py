"""What a consumer of the forward computes on its tile of scores between the matrix products.

Scores are [ROWS, TILE_N] in layout L: fragments are called with QX = 1, a vector of queries has
SliceLayout(1, L) and one of keys SliceLayout(0, L). Glossary: forward_shared.py.

    x            scores in the units that exponents are taken in: weight = 2**(x * base)
    context      (b, h, queries, score, mask, bias), the last three of their fragments: (args, head,
                 row) and for the score the first query; for the bias (args, head, what it adds by
                 key from the first of a tile)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.builtins import chosen, exp2_fast, times_unless_one
from attnloom.backends.gluon.emit_mask import LANE
from attnloom.backends.gluon.forward_columns import read_columns
from attnloom.backends.gluon.forward_shared import key_tile
from attnloom.backends.gluon.forward_strips import (
    STRIP,
    no_strips,
    packed_strips,
    strips_exp,
    strips_if,
    strips_max,
    strips_scaled,
    strips_times,
    unpacked_strips,
)
from attnloom.backends.triton.device_math import LN_2

# Below no finite number. A maximum that begins here (FLOOR) needs no question in each step whether
# its row has seen a key: exponentials of -inf are 0 beside it, as long as `base` is at most 1.
LEAST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def _halves(x):
    """The left and right half of the columns, which the same threads hold."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def row_max(x, L: gl.constexpr):
    """Maximum of rows. The stock reduction is one chain of maxima a thread; two halvings before
    it make four (D = 128 causal: +1-2%, H200)."""
    left, right = _halves(x)
    left, right = _halves(gl.maximum(left, right))
    found = gl.max(gl.maximum(left, right), 1)
    return gl.convert_layout(found, gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit
def contexts(score_args, mask_args, b, h, first, queries, q_offset, cfg: gl.constexpr):
    """What fragments know of a head and of a consumer's queries. first: of these."""
    score = (score_args, 0, 0, 0)
    mask = (mask_args, 0, 0)
    bias = (score_args, 0, 0)
    if cfg.HAS_BIAS:
        head = cfg.BIAS_HEAD(score_args, b, h)
        steps = gl.arange(0, cfg.TILE_N, gl.SliceLayout(0, queries.type.layout.parent))
        slope = cfg.BIAS_SLOPE(score_args, head, b, h)
        bias = (score_args, head, steps.to(gl.float32) * slope)
    if cfg.HAS_SCORE:
        head = cfg.SCORE_HEAD(score_args, b, h)
        score = (score_args, head, cfg.SCORE_ROW(score_args, head, b, h, queries), first)
    if cfg.HAS_MASK:
        head = cfg.MASK_HEAD(mask_args, b, h)
        mask = (mask_args, head, cfg.MASK_ROW(mask_args, head, b, h, queries + q_offset))
    return b, h, queries, score, mask, bias


@gluon.jit
def key_positions(tag, L: gl.constexpr, cfg: gl.constexpr):
    N: gl.constexpr = STRIP if cfg.STRIPS else cfg.TILE_N
    return key_tile(tag, cfg) * cfg.TILE_N + gl.arange(0, N, gl.SliceLayout(0, L))


@gluon.jit
def columns(context, keys, cfg: gl.constexpr):
    """What the score_mod needs of a step's keys; asked for before the scores are waited for."""
    if cfg.HAS_SCORE:
        b, h, _, score, _, _ = context
        args, head, _, _ = score
        return cfg.SCORE_COLUMN(args, head, b, h, keys)
    else:
        return (0,)


@gluon.jit
def look_up(context, tag, cfg: gl.constexpr):
    """What single scores of a step look up, see pieces.py; likewise."""
    if cfg.HAS_SCORE:
        b, h, _, score, _, _ = context
        args, head, _, first = score
        key = key_tile(tag, cfg) * cfg.TILE_N
        return cfg.SCORE_PIECES(args, head, b, h, first, key, cfg.TILE_N, 1)
    else:
        return (0,)


@gluon.jit
def modified(s, context, column, pieces, keys, factor, cfg: gl.constexpr):
    """x of raw products, before the mask, less what `row_bias` adds."""
    if not cfg.UNSCALED:
        s = strips_scaled(s, factor) if cfg.STRIPS else s * factor
    b, h, queries, score, _, bias = context
    if cfg.HAS_SCORE:
        args, head, row, _ = score
        s = cfg.SCORE_BODY(args, head, row, column, b, h, queries, keys, pieces, s, 1)
    if cfg.HAS_BIAS:
        s = s + bias[2][None, :]
    return s


@gluon.jit
def row_bias(context, tag, cfg: gl.constexpr):
    """What is added to x by query: the linear bias at the first key of the tile."""
    if cfg.HAS_BIAS:
        b, h, queries, _, _, bias = context
        args, head, _ = bias
        return cfg.BIAS_AT(args, head, b, h, queries, key_tile(tag, cfg) * cfg.TILE_N)
    else:
        return 0.0


@gluon.jit
def masked(s, context, mem, n, tag, keys, live, at, L: gl.constexpr, cfg: gl.constexpr):
    """-inf where the mask is false and past the last key. live: whether the consumer's block is.
    n, at: see forward_sm90.consume."""
    q_offset, kv_offset, kv_len, _, _, _ = at
    LIMITED: gl.constexpr = cfg.HAS_TAIL or cfg.APART
    first = key_tile(tag, cfg) * cfg.TILE_N
    limit = _last_column(first, live, kv_len, cfg)
    place = gl.arange(0, cfg.TILE_N, gl.SliceLayout(0, L))
    if cfg.HAS_MASK:
        b, h, queries, _, mask, _ = context
        args, head, row = mask
        q, kv = queries + q_offset, keys + kv_offset
        if cfg.NUM_COLUMNS > 0:
            column = read_columns(mem, n, L, cfg)
        else:
            column = cfg.MASK_COLUMN(args, head, b, h, kv)
        edges = cfg.MASK_EDGES(args, head, row, b, h, q, first + kv_offset, limit, LIMITED)
        keep = cfg.MASK_BODY(args, head, row, column, edges, b, h, q, kv, place, 1, LIMITED)
        if cfg.MASK_JOINS:
            return chosen(keep, s, float("-inf"))
        else:
            return gl.where(keep, s, float("-inf"))
    else:
        lane = place & LANE
        return gl.where((place - lane <= limit - lane)[None, :], s, float("-inf"))


@gluon.jit
def _last_column(first, live, kv_len, cfg: gl.constexpr):
    """Of a tile from key `first` on, the last that exists, -1 if the consumer has none."""
    limit = cfg.TILE_N
    if cfg.HAS_TAIL:
        limit = kv_len - 1 - first
    if cfg.APART:
        limit = gl.where(live, limit, -1)
    return limit


@gluon.jit
def softmax_step(s, bias, m_i, l_i, base, L: gl.constexpr, cfg: gl.constexpr):
    """(weights, m_i, l_i, what earlier weights are multiplied by). bias: see row_bias."""
    if cfg.STRIPS:
        highest = strips_max(s, L)
    else:
        highest = row_max(s, L)
    if cfg.HAS_BIAS:
        highest = highest + bias
    m_new = gl.maximum(m_i, highest)
    top = m_new
    if (cfg.MAY_MASK or cfg.HAS_SCORE) and not cfg.FLOOR:
        # a row without a key so far would give exp2(-inf + inf)
        top = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = exp2_fast((m_i - top) * base)
    if cfg.HAS_BIAS:
        top = top - bias
    if cfg.STRIPS:
        p, total = strips_exp(s, (top * base)[:, None], base)
    elif cfg.HUGE:
        # rounded, top * base is off by more than exponents may be, or past all numbers
        p = exp2_fast((s - top[:, None]) * base)
    else:
        p = exp2_fast(s * base - (top * base)[:, None])
    if not cfg.STRIPS:
        total = p
    if cfg.BY_LANE:
        LANES: gl.constexpr = l_i.type.layout
        past = gl.convert_layout(alpha, gl.SliceLayout(1, LANES), assert_trivial=True)
        return p, m_new, l_i * past[:, None] + _lane_sums(total), alpha
    else:
        return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _lane_sums(p):
    """[ROWS, 4]: sums of what each of the four lanes of a row holds."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def row_sums(l_i, L: gl.constexpr, cfg: gl.constexpr):
    if cfg.BY_LANE:
        return gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, L), assert_trivial=True)
    else:
        return l_i


@gluon.jit
def caught_up(acc, alpha, OUT: gl.constexpr, cfg: gl.constexpr):
    """The output of earlier steps in units of this one's; LAZY: no warp multiplies by ones."""
    if cfg.STRIPS:
        return strips_times(acc, alpha, OUT)
    elif cfg.LAZY:
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        if cfg.PARTS == 3:
            return (
                times_unless_one(acc[0], factor),
                times_unless_one(acc[1], factor),
                times_unless_one(acc[2], factor),
            )
        else:
            return times_unless_one(acc, factor)
    else:
        return rescaled(acc, alpha, OUT, cfg)


@gluon.jit
def rescaled(acc, alpha, OUT: gl.constexpr, cfg: gl.constexpr):
    """Rows of the output multiplied by a vector of queries."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    if cfg.PARTS == 3:
        return acc[0] * factor, acc[1] * factor, acc[2] * factor
    else:
        return acc * factor


@gluon.jit
def only_if(live, acc, cfg: gl.constexpr):
    """The output of a tile, or zeros."""
    if cfg.STRIPS:
        return strips_if(live, acc)
    elif cfg.PARTS == 3:
        return gl.where(live, acc[0], 0.0), gl.where(live, acc[1], 0.0), gl.where(live, acc[2], 0.0)
    else:
        return gl.where(live, acc, 0.0)


@gluon.jit
def empty_state(L: gl.constexpr, OUT: gl.constexpr, cfg: gl.constexpr):
    """(acc, m_i, l_i) before the first step."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, L)
    m_i = gl.full([cfg.ROWS], LEAST if cfg.FLOOR else float("-inf"), gl.float32, VECTOR)
    l_i = gl.full([cfg.ROWS], 0.0, gl.float32, VECTOR)
    if cfg.BY_LANE:
        N: gl.constexpr = STRIP if cfg.STRIPS else cfg.TILE_N
        l_i = _lane_sums(gl.zeros([cfg.ROWS, N], gl.float32, L))
    if cfg.STRIPS:
        acc = no_strips(L, cfg)
    else:
        acc = gl.zeros([cfg.ROWS, cfg.PART], gl.float32, OUT)
        if cfg.PARTS == 3:
            acc = acc, acc, acc
    return acc, m_i, l_i


@gluon.jit
def log_sums(m_i, l_i, base, cfg: gl.constexpr):
    """(lse, maxima), natural units; -inf for rows without keys."""
    natural = m_i * (base * LN_2)
    if cfg.FLOOR:
        # sums are more than 0 where a score is LEAST, and NaN where one is
        natural = gl.where((m_i == LEAST) & ~(l_i > 0), float("-inf"), natural)
    return gl.where(l_i == 0, float("-inf"), natural + gl.log(l_i)), natural


_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_PAIR_OF_HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def carried(weights, OUT: gl.constexpr, cfg: gl.constexpr):
    """Weights as the loop hands them to its next step. PACKED: pairs of columns in one register;
    as single 16-bit values they would be put together once more there (32 PRMT a step, D = 64)."""
    if cfg.STRIPS:
        if cfg.PACKED:
            return packed_strips(weights, cfg)
        else:
            return unpacked_strips(packed_strips(weights, cfg), OUT, cfg)
    elif cfg.PACKED:
        M: gl.constexpr = weights.shape[0]
        N: gl.constexpr = weights.shape[1]
        left, right = weights.reshape([M, N // 2, 2]).split()
        HOW: gl.constexpr = _PAIR if gl.bfloat16 == cfg.OPERAND else _PAIR_OF_HALVES
        return gl.inline_asm_elementwise(
            HOW, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
        )
    elif cfg.WIDE:
        return weights.to(cfg.OPERAND)
    else:
        return gl.convert_layout(weights.to(cfg.OPERAND), gl.DotOperandLayout(0, OUT, 2))


@gluon.jit
def operand(p, L: gl.constexpr, OUT: gl.constexpr, cfg: gl.constexpr):
    """The same as p . v takes them."""
    if cfg.STRIPS:
        return unpacked_strips(p, L, cfg)
    elif cfg.PACKED:
        left = p.to(gl.int16).to(cfg.OPERAND, bitcast=True)
        right = (p >> 16).to(gl.int16).to(cfg.OPERAND, bitcast=True)
        whole = gl.join(left, right).reshape([cfg.ROWS, cfg.TILE_N])
        whole = gl.convert_layout(whole, L, assert_trivial=True)
        if cfg.WIDE:
            return whole
        else:
            return gl.convert_layout(whole, gl.DotOperandLayout(0, OUT, 2))
    else:
        return p
