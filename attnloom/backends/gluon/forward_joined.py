"""A consumer of the forward whose tiles are joined: the first scores of a tile are computed under
the last p . v of the one before, and its results leave meanwhile.

For calls without lists, whose tiles all have steps, and without PREFETCH and TURNS. Of a tile that
is not there the product multiplies what lies in shared memory, and nobody uses it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_math import (
    carried,
    caught_up,
    columns,
    contexts,
    empty_state,
    key_positions,
    look_up,
    operand,
    row_sums,
)
from attnloom.backends.gluon.forward_products import add_output, scores, take_queries
from attnloom.backends.gluon.forward_results import store_results
from attnloom.backends.gluon.forward_shared import query_phase, query_slot, take_job
from attnloom.backends.gluon.forward_steps import further_steps, step_weights, wait_ahead
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    KEYS_THERE,
    QUERIES_THERE,
    VALUES_LEFT,
    VALUES_THERE,
    get,
    leave,
    leave_if,
    leave_queries,
    phase_of,
    slot_of,
    wait_there,
    wait_there_if,
)


@gluon.jit
def _wait_for_tile(mem, num_tiles, n, there, consumer, L: gl.constexpr, cfg: gl.constexpr):
    """Queries of a tile; there: if it is, they and the keys of its first step n are waited for."""
    slot = query_slot(num_tiles, consumer, cfg)
    phase = query_phase(num_tiles, cfg)
    wait_there_if(there, mem, mem.q_full, slot, phase, QUERIES_THERE, cfg)
    slot_n = slot_of(n, cfg)
    wait_there_if(there, mem, mem.k_full, slot_n, phase_of(n, cfg), KEYS_THERE, cfg)
    return take_queries(mem, slot, L, cfg)


@gluon.jit
def _finish_scores(s, mem, n, there, cfg: gl.constexpr):
    """(scores, tag) of a tile's first step, whose keys are given back."""
    slot = slot_of(n, cfg)
    tag = 0
    if cfg.NEEDS_KEYS:
        # LLVM moves a load to where its value is used, past an arrival of addresses.py, after
        # which the next tag may lie there; not so if this asks for it.
        tag = bi.unknown(get(mem.tags.index(slot)))
    s = warpgroup_mma_wait(0, [s])
    leave_if(there, mem, mem.k_empty, slot, KEYS_LEFT, cfg)
    return s, tag


@gluon.jit
def consume_joined(
    out_desc, outs, mem, sizes, score_args, mask_args, scales, consumer, cfg: gl.constexpr
):
    """As forward_sm90.consume."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, cfg.TILE_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, cfg.PART, 16])
    heads, q_len, kv_len, q_offset, kv_offset = sizes
    factor, base = scales
    if cfg.BAKED:
        factor, base = cfg.FACTOR, cfg.BASE
    at = (q_offset, kv_offset, kv_len, factor, base, mem.values_at)
    n = 0
    num_tiles = 0
    tile, unit, steps, _ = take_job(mem, 0, cfg)
    q = _wait_for_tile(mem, 0, 0, tile >= 0, consumer, L, cfg)
    s = scores(q, mem, n, L, cfg)
    s, tag = _finish_scores(s, mem, n, tile >= 0, cfg)
    while tile >= 0:
        b, h = unit // heads, unit % heads
        row = (tile * cfg.CONSUMERS + consumer) * cfg.ROWS
        queries = row + gl.arange(0, cfg.ROWS, gl.SliceLayout(1, L))
        context = contexts(score_args, mask_args, b, h, row, queries, q_offset, cfg)
        acc, m_i, l_i = empty_state(L, OUT, cfg)
        keys = key_positions(tag, L, cfg)
        prepared = tag, keys, columns(context, keys, cfg), look_up(context, tag, cfg)
        weights, m_i, l_i, alpha, pieces = step_weights(
            s, mem, n, steps > 1, prepared, context, (m_i, l_i), at, consumer, L, cfg
        )
        p = carried(weights, OUT, cfg)
        wait_ahead(mem, n + 1, steps > 1, cfg)
        n += 1
        state = m_i, l_i, pieces, alpha
        acc, p, m_i, l_i, alpha, n = further_steps(
            q, mem, n, steps, acc, p, state, context, at, consumer, L, OUT, cfg
        )
        leave_queries(mem, query_slot(num_tiles, consumer, cfg), cfg)
        num_tiles += 1
        place = (b, h, unit, row, queries, q_len)
        tile, unit, steps, _ = take_job(mem, num_tiles, cfg)
        q = _wait_for_tile(mem, num_tiles, n, tile >= 0, consumer, L, cfg)
        p = operand(p, L, OUT, cfg)
        if cfg.LATE:
            acc = caught_up(acc, alpha, OUT, cfg)
        last = slot_of(n - 1, cfg)
        wait_there(mem, mem.v_full, last, phase_of(n - 1, cfg), VALUES_THERE, cfg)
        acc = add_output(p, mem, at[5], last, acc, cfg)
        s = scores(q, mem, n, L, cfg)
        acc, p = warpgroup_mma_wait(1, [acc, p])
        leave(mem, mem.v_empty, last, VALUES_LEFT, cfg)
        l_i = row_sums(l_i, L, cfg)
        store_results(out_desc, outs, mem, consumer, acc, m_i, l_i, place, base, OUT, cfg)
        s, tag = _finish_scores(s, mem, n, tile >= 0, cfg)
    tma.store_wait(0)
