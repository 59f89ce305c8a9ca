"""Forward of fused attention for Hopper: warp-specialised online softmax over live key blocks.

Algorithm: FlashAttention-2 and -3 (Dao 2023, Shah et al. 2024) on the block lists of a BlockMask.
Parallelisation: one program a processor. A producer warp draws tiles and fills rings of keys and
values by TMA; each of up to three consumers owns ROWS queries of the tile and all of its keys.

A step of a consumer, OVERLAP: the product q . k^T of this step and p . v of the last are issued
together, and the exponentials of this step run while the latter is computed. Otherwise the three
follow each other, and the consumers fill each other's gaps; for tiles whose scores and output leave
no registers for a second p.

Heads of 129 to 192 may lie in three PANELS of 64 columns, where a tile of a power of two would have
256: as many products of a step, each a group of its own to wait for, and as many accumulators. Of
a tile of 128, q . k^T may leave out columns that heads of 65 to 96 do not use (REST).

AHEAD: nothing in PTX ties the exponentials of a step to the wait for its product p . v, and ptxas
puts them after that wait, so that nothing runs while it is computed. The end of a basic block stops
it, as the loop around a barrier's wait is one: the next step's keys are waited for in between.

One loop takes full and partial blocks, with a branch around the mask: separate loops double the
code and spill. What single scores look up (pieces.py) is loaded while the product q . k^T is
computed; PREFETCH: by the step before, as soon as its own is used, and kept in registers.

Everything in flight is waited for within the step that issued it or the next
statement: ptxas serialises products that cross the back edge of a loop otherwise (C7514).

Glossaries: forward_shared.py, forward_math.py, backends/triton/forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_columns import write_columns
from attnloom.backends.gluon.forward_load import load_tiles
from attnloom.backends.gluon.forward_math import (
    carried,
    caught_up,
    columns,
    contexts,
    empty_state,
    key_positions,
    look_up,
    masked,
    modified,
    only_if,
    operand,
    row_bias,
    row_sums,
    softmax_step,
)
from attnloom.backends.gluon.forward_products import (
    add_output,
    arrived,
    finished,
    scores,
    take_queries,
)
from attnloom.backends.gluon.forward_shared import (
    ALL_FULL,
    allocate,
    is_full,
    query_phase,
    query_slot,
    take_job,
)
from attnloom.backends.gluon.forward_store import store
from attnloom.backends.gluon.forward_strips import STRIP, masked_strips, three_parts
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    KEYS_THERE,
    QUERIES_THERE,
    VALUES_LEFT,
    VALUES_THERE,
    first_turn,
    get,
    last_turn,
    leave,
    leave_if,
    leave_queries,
    pass_turn,
    phase_of,
    slot_of,
    take_turn,
    wait_there,
    wait_there_if,
)
from attnloom.backends.triton.device_math import whole32


@gluon.jit
def _prepare(mem, slot, live, context, pieces, L: gl.constexpr, cfg: gl.constexpr):
    """(tag, keys, columns, pieces) of a step, while its product is in flight. live: there is a
    step. pieces: if PREFETCH; else they are asked for here."""
    tag = 0
    if cfg.NEEDS_KEYS:
        tag = get(mem.tags.index(slot))
        if cfg.MAY_BE_EMPTY:
            # of no step: full for all, or the columns of no keys would be waited for
            tag = gl.where(live, tag, ALL_FULL if cfg.APART else 0)
    keys = key_positions(tag, L, cfg)
    if not cfg.PREFETCH:
        pieces = look_up(context, tag, cfg)
    return tag, keys, columns(context, keys, cfg), pieces


@gluon.jit
def _look_up_ahead(mem, n, live, context, cfg: gl.constexpr):
    """Pieces of step n, once its tag is there; if it is not live, of keys that exist."""
    if cfg.PREFETCH:
        slot = slot_of(n, cfg)
        wait_there_if(live, mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
        return look_up(context, gl.where(live, get(mem.tags.index(slot)), 0), cfg)
    else:
        return 0


@gluon.jit
def _wait_ahead(mem, n, live, cfg: gl.constexpr):
    """For the keys of step n, if it is live."""
    if cfg.AHEAD:
        wait_there_if(live, mem, mem.k_full, slot_of(n, cfg), phase_of(n, cfg), KEYS_THERE, cfg)


@gluon.jit
def _weights(
    s, mem, n, more, prepared, context, state, at, consumer, L: gl.constexpr, cfg: gl.constexpr
):
    """The softmax of a step: (p, m_i, l_i, alpha, the next step's pieces if PREFETCH). more: the
    tile has a next step. at: see `consume`."""
    tag, keys, column, pieces = prepared
    _, _, _, factor, base, _ = at
    bias = row_bias(context, tag, cfg)
    s = modified(s, context, column, pieces, keys, factor, cfg)
    following = _look_up_ahead(mem, n + 1, more, context, cfg)
    if cfg.MAY_MASK:
        if not is_full(tag, consumer, cfg):
            live = True
            if cfg.APART:
                live = (tag >> (2 * consumer + 1)) & 1 != 0
            if cfg.STRIPS:
                s = masked_strips(s, context, mem, n, at, L, cfg)
            else:
                s = masked(s, context, mem, n, tag, keys, live, at, L, cfg)
    p, m_i, l_i, alpha = softmax_step(s, bias, state[0], state[1], base, L, cfg)
    return p, m_i, l_i, alpha, following


@gluon.jit
def _overlapped_step(
    q, mem, n, more, acc, p, state, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Scores and exponentials of step n, the output of step n - 1. state = (m_i, l_i, pieces,
    alpha if LATE)."""
    slot, last = slot_of(n, cfg), slot_of(n - 1, cfg)
    if not cfg.AHEAD:
        wait_there(mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
    p = operand(p, L, OUT, cfg)
    take_turn(consumer, cfg)
    s = scores(q, mem, n, L, cfg)
    if cfg.LATE:
        acc = caught_up(acc, state[3], OUT, cfg)
    wait_there(mem, mem.v_full, last, phase_of(n - 1, cfg), VALUES_THERE, cfg)
    acc = add_output(p, mem, at[5], last, acc, cfg)
    pass_turn(consumer, cfg)
    prepared = _prepare(mem, slot, True, context, state[2], L, cfg)
    s = arrived(1 if cfg.WIDE else cfg.PANELS, s, cfg)
    leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
    weights, m_i, l_i, alpha, pieces = _weights(
        s, mem, n, more, prepared, context, state, at, consumer, L, cfg
    )
    if not cfg.PACKED:
        following = carried(weights, OUT, cfg)
    _wait_ahead(mem, n + 1, more, cfg)
    acc, p = finished(acc, p, cfg)
    if cfg.PACKED:  # into the registers of the last ones
        following = carried(weights, OUT, cfg)
    leave(mem, mem.v_empty, last, VALUES_LEFT, cfg)
    if not cfg.LATE:
        acc = caught_up(acc, alpha, OUT, cfg)
    return acc, following, m_i, l_i, pieces, alpha


@gluon.jit
def _overlapped_tile(
    q, mem, n, steps, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr, cfg: gl.constexpr
):
    """(acc, m_i, l_i, number of the next step) of a tile's steps, one product behind the other."""
    live = True
    if cfg.MAY_BE_EMPTY:
        live = steps > 0
    acc, m_i, l_i = empty_state(L, OUT, cfg)
    slot = slot_of(n, cfg)
    # without a step this multiplies what lies there, which nobody uses
    wait_there_if(live, mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
    s = scores(q, mem, n, L, cfg)
    pieces = _look_up_ahead(mem, n, live, context, cfg)
    prepared = _prepare(mem, slot, live, context, pieces, L, cfg)
    s = arrived(0, s, cfg)
    leave_if(live, mem, mem.k_empty, slot, KEYS_LEFT, cfg)
    weights, m_i, l_i, alpha, pieces = _weights(
        s, mem, n, steps > 1, prepared, context, (m_i, l_i), at, consumer, L, cfg
    )
    p = carried(weights, OUT, cfg)
    _wait_ahead(mem, n + 1, steps > 1, cfg)
    if cfg.MAY_BE_EMPTY:
        n += live.to(gl.int32)
    else:
        n += 1
    for i in range(1, steps):
        state = m_i, l_i, pieces, alpha
        acc, p, m_i, l_i, pieces, alpha = _overlapped_step(
            q, mem, n, i + 1 < steps, acc, p, state, context, at, consumer, L, OUT, cfg
        )
        n += 1
    if cfg.LATE:
        acc = caught_up(acc, alpha, OUT, cfg)
    if cfg.OUT_RING:
        # of one stage, so that the slot is the consumer's number
        leave_queries(mem, consumer, cfg)
    last = slot_of(n - 1, cfg)
    wait_there_if(live, mem, mem.v_full, last, phase_of(n - 1, cfg), VALUES_THERE, cfg)
    p = operand(p, L, OUT, cfg)
    acc, p = finished(add_output(p, mem, at[5], last, acc, cfg), p, cfg)
    leave_if(live, mem, mem.v_empty, last, VALUES_LEFT, cfg)
    if cfg.MAY_BE_EMPTY:
        acc = only_if(live, acc, cfg)
        m_i = gl.where(live, m_i, float("-inf"))
        l_i = gl.where(live, l_i, 0.0)
    return acc, m_i, l_i, n


@gluon.jit
def _plain_tile(
    q, mem, n, steps, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr, cfg: gl.constexpr
):
    """The same, one after the other."""
    acc, m_i, l_i = empty_state(L, OUT, cfg)
    pieces = _look_up_ahead(mem, n, steps > 0, context, cfg)
    for i in range(0, steps):
        slot, phase = slot_of(n, cfg), phase_of(n, cfg)
        wait_there(mem, mem.k_full, slot, phase, KEYS_THERE, cfg)
        s = scores(q, mem, n, L, cfg)
        prepared = _prepare(mem, slot, True, context, pieces, L, cfg)
        s = arrived(0, s, cfg)
        leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
        weights, m_i, l_i, alpha, pieces = _weights(
            s, mem, n, i + 1 < steps, prepared, context, (m_i, l_i), at, consumer, L, cfg
        )
        p = carried(weights, OUT, cfg)
        acc = caught_up(acc, alpha, OUT, cfg)
        wait_there(mem, mem.v_full, slot, phase, VALUES_THERE, cfg)
        acc, p = finished(add_output(p, mem, at[5], slot, acc, cfg), p, cfg)
        leave(mem, mem.v_empty, slot, VALUES_LEFT, cfg)
        n += 1
    return acc, m_i, l_i, n


@gluon.jit
def consume(out_desc, outs, mem, sizes, score_args, mask_args, scales, consumer, cfg: gl.constexpr):
    """What a consumer does. sizes = (Hq, Q_LEN, KV_LEN, q_offset, kv_offset)."""
    N: gl.constexpr = STRIP if cfg.STRIPS else cfg.TILE_N
    PART: gl.constexpr = STRIP if cfg.STRIPS else cfg.PART
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, PART, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, cfg.PART, 16])
    heads, q_len, kv_len, q_offset, kv_offset = sizes
    factor, base = scales
    if cfg.BAKED:
        # literals cost no registers: D = 128 causal +1-2% (H200)
        factor, base = cfg.FACTOR, cfg.BASE
    at = (q_offset, kv_offset, kv_len, factor, base, mem.values_at)
    n = 0
    num_tiles = 0
    first_turn(consumer, cfg)
    tile, unit, steps = take_job(mem, 0)
    while tile >= 0:
        b, h = unit // heads, unit % heads
        row = (tile * cfg.CONSUMERS + consumer) * cfg.ROWS
        queries = row + gl.arange(0, cfg.ROWS, gl.SliceLayout(1, L))
        context = contexts(score_args, mask_args, b, h, row, queries, q_offset, cfg)
        slot = query_slot(num_tiles, consumer, cfg)
        wait_there(mem, mem.q_full, slot, query_phase(num_tiles, cfg), QUERIES_THERE, cfg)
        first = slot * cfg.PANELS
        q = take_queries(mem, first, L, cfg)
        if cfg.Q_KEPT == cfg.PANELS and not cfg.OUT_IN_Q:
            leave_queries(mem, slot, cfg)
        if cfg.OVERLAP:
            acc, m_i, l_i, n = _overlapped_tile(
                q, mem, n, steps, context, at, consumer, L, OUT, cfg
            )
        else:
            acc, m_i, l_i, n = _plain_tile(q, mem, n, steps, context, at, consumer, L, OUT, cfg)
        l_i = row_sums(l_i, L, cfg)
        if cfg.STRIPS:
            acc = three_parts(acc, RESULT)
        place = (b, h, unit, row, queries, q_len)
        if cfg.OUT_IN_Q:
            store(out_desc, outs, mem, first, acc, m_i, l_i, place, base, RESULT, cfg)
            tma.store_wait(0)
            leave_queries(mem, slot, cfg)
        else:
            if cfg.Q_KEPT < cfg.PANELS and not cfg.OUT_RING:
                leave_queries(mem, slot, cfg)
            first = consumer * (2 if cfg.OUT_RING else cfg.PANELS)
            store(out_desc, outs, mem, first, acc, m_i, l_i, place, base, RESULT, cfg)
        num_tiles += 1
        tile, unit, steps = take_job(mem, num_tiles)
    tma.store_wait(0)
    last_turn(consumer, cfg)


@gluon.jit
def _consumer(
    out_desc, outs, mem, sizes, score_args, mask_args, scales, NUMBER: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """The partition of a consumer. Its number is a value, so that Triton reads the functions above
    for one consumer and copies what it made of them (0.1 to 0.2 s a kernel, Triton 3.6)."""
    number = bi.scalar(NUMBER, gl.int32)
    consume(out_desc, outs, mem, sizes, score_args, mask_args, scales, number, cfg)


@gluon.jit(do_not_specialize=["lists", "score_args", "mask_args", "factor", "base", "shape"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, max_scores, counter, lists, score_args, mask_args,
    factor, base, shape, cfg: gl.constexpr,
):  # fmt: skip
    """shape = (Hq, Q_LEN, KV_LEN, q_offset, kv_offset, GROUP, row tiles, heads of a batch, B * Hq,
    steps without lists, tiles of the launch, kv batch step 0/1, key block or tile that overhangs
    KV_LEN or -1), packed. counter: one int32, 0 before and after. lists = (entries, work, batch
    step, head step), see backends/triton/lists.py. x = factor * (q . k) before the score_mod, and
    2**(base * x) is a weight."""
    mem = allocate(cfg)
    heads = whole32(shape, 0)
    sizes = (
        heads, whole32(shape, 3), whole32(shape, 6), whole32(shape, 9), whole32(shape, 12),
    )  # fmt: skip
    plan = (
        heads, whole32(shape, 15), whole32(shape, 18), whole32(shape, 21), whole32(shape, 24),
        whole32(shape, 27), whole32(shape, 30), whole32(shape, 33), whole32(shape, 36),
    )  # fmt: skip
    if cfg.STRIPS:
        plan += (sizes[2],)
    listed = (lists[0], lists[1], whole32(lists, 2), whole32(lists, 5))
    outs, scales = (lse, max_scores), (factor, base)
    SECOND_WARPS: gl.constexpr = 4 if cfg.CONSUMERS > 1 else 0
    THIRD_WARPS: gl.constexpr = 4 if cfg.CONSUMERS == 3 else 0
    COLUMN_WARPS: gl.constexpr = 1 if cfg.NUM_COLUMNS > 0 else 0
    bi.warp_specialize(
        [
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 0, cfg)),
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 1, cfg)),
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 2, cfg)),
            (load_tiles, (q_desc, k_desc, v_desc, mem, counter, listed, plan, cfg)),
            (write_columns, (mem, heads, sizes[4], mask_args, cfg)),
        ],
        [SECOND_WARPS, THIRD_WARPS, 1, COLUMN_WARPS],
        [cfg.REGISTERS, cfg.REGISTERS, cfg.LOAD_REGISTERS, cfg.LOAD_REGISTERS],
    )
