"""Steps of a consumer of the forward, and those of a tile one after the other.

A step of a consumer, OVERLAP: the product q . k^T of this step and p . v of the last are issued
together, and the exponentials of this step run while the latter is computed. Otherwise the three
follow each other, and the consumers fill each other's gaps; for tiles whose scores and output leave
no registers for a second p.

AHEAD: nothing in PTX ties the exponentials of a step to the wait for its product p . v, and ptxas
puts them after that wait, so that nothing runs while it is computed. The end of a basic block stops
it, as the loop around a barrier's wait is one: the next step's keys are waited for in between.

One loop takes full and partial blocks, with a branch around the mask: separate loops double the
code and spill. What single scores look up (pieces.py) is loaded while the product q . k^T is
computed; PREFETCH: by the step before, as soon as its own is used, and kept in registers.

Everything in flight is waited for within the step that issued it or the next
statement: ptxas serialises products that cross the back edge of a loop otherwise (C7514).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.forward_math import (
    carried,
    caught_up,
    columns,
    empty_state,
    key_positions,
    look_up,
    masked,
    modified,
    only_if,
    operand,
    row_bias,
    softmax_step,
)
from attnloom.backends.gluon.forward_passed import (
    pass_over_keys,
    pass_over_values,
)
from attnloom.backends.gluon.forward_products import add_output, arrived, finished, scores
from attnloom.backends.gluon.forward_shared import (
    ALL_FULL,
    is_full,
)
from attnloom.backends.gluon.forward_strips import masked_strips
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    KEYS_THERE,
    VALUES_LEFT,
    VALUES_THERE,
    get,
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


@gluon.jit
def prepare_step(mem, slot, live, context, pieces, L: gl.constexpr, cfg: gl.constexpr):
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
def look_up_ahead(mem, n, live, context, cfg: gl.constexpr):
    """Pieces of step n, once its tag is there; if it is not live, of keys that exist."""
    if cfg.PREFETCH:
        slot = slot_of(n, cfg)
        wait_there_if(live, mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
        return look_up(context, gl.where(live, get(mem.tags.index(slot)), 0), cfg)
    else:
        return 0


@gluon.jit
def wait_ahead(mem, n, live, cfg: gl.constexpr):
    """For the keys of step n, if it is live."""
    if cfg.AHEAD:
        wait_there_if(live, mem, mem.k_full, slot_of(n, cfg), phase_of(n, cfg), KEYS_THERE, cfg)


@gluon.jit
def step_weights(
    s, mem, n, more, prepared, context, state, at, consumer, L: gl.constexpr, cfg: gl.constexpr
):
    """The softmax of a step: (p, m_i, l_i, alpha, the next step's pieces if PREFETCH). more: the
    tile has a next step. at: see `consume`."""
    tag, keys, column, pieces = prepared
    _, _, _, factor, base, _ = at
    bias = row_bias(context, tag, cfg)
    s = modified(s, context, column, pieces, keys, factor, cfg)
    following = look_up_ahead(mem, n + 1, more, context, cfg)
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
def overlapped_step(
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
    prepared = prepare_step(mem, slot, True, context, state[2], L, cfg)
    s = arrived(1 if cfg.WIDE else cfg.PANELS, s, cfg)
    leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
    weights, m_i, l_i, alpha, pieces = step_weights(
        s, mem, n, more, prepared, context, state, at, consumer, L, cfg
    )
    if not cfg.PACKED:
        following = carried(weights, OUT, cfg)
    wait_ahead(mem, n + 1, more, cfg)
    acc, p = finished(acc, p, cfg)
    if cfg.PACKED:  # into the registers of the last ones
        following = carried(weights, OUT, cfg)
    leave(mem, mem.v_empty, last, VALUES_LEFT, cfg)
    if not cfg.LATE:
        acc = caught_up(acc, alpha, OUT, cfg)
    return acc, following, m_i, l_i, pieces, alpha


@gluon.jit
def further_steps(
    q, mem, n, steps, acc, p, state, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """A tile's steps from its second on, which is number n: (acc, p, m_i, l_i, alpha, number of the
    next step). state = (m_i, l_i, pieces, alpha) of the first."""
    m_i, l_i, pieces, alpha = state
    for i in range(1, steps):
        state = m_i, l_i, pieces, alpha
        acc, p, m_i, l_i, pieces, alpha = overlapped_step(
            q, mem, n, i + 1 < steps, acc, p, state, context, at, consumer, L, OUT, cfg
        )
        n += 1
    return acc, p, m_i, l_i, alpha, n


@gluon.jit
def overlapped_tile(
    q, mem, n, steps, passed, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """(acc, m_i, l_i, number of the next step) of a tile's steps, one product behind the other.
    passed: of `own_steps`."""
    pass_over_keys(mem, n, passed[0], consumer, cfg)
    n = pass_over_values(mem, n, passed[0], cfg)
    live = True
    if cfg.MAY_BE_EMPTY:
        live = steps > 0
    acc, m_i, l_i = empty_state(L, OUT, cfg)
    slot = slot_of(n, cfg)
    # without a step this multiplies what lies there, which nobody uses
    wait_there_if(live, mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
    s = scores(q, mem, n, L, cfg)
    pieces = look_up_ahead(mem, n, live, context, cfg)
    prepared = prepare_step(mem, slot, live, context, pieces, L, cfg)
    s = arrived(0, s, cfg)
    leave_if(live, mem, mem.k_empty, slot, KEYS_LEFT, cfg)
    weights, m_i, l_i, alpha, pieces = step_weights(
        s, mem, n, steps > 1, prepared, context, (m_i, l_i), at, consumer, L, cfg
    )
    p = carried(weights, OUT, cfg)
    wait_ahead(mem, n + 1, steps > 1, cfg)
    if cfg.MAY_BE_EMPTY:
        n += live.to(gl.int32)
    else:
        n += 1
    state = m_i, l_i, pieces, alpha
    acc, p, m_i, l_i, alpha, n = further_steps(
        q, mem, n, steps, acc, p, state, context, at, consumer, L, OUT, cfg
    )
    pass_over_keys(mem, n, passed[1], consumer, cfg)
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
    n = pass_over_values(mem, n, passed[1], cfg)
    if cfg.MAY_BE_EMPTY:
        acc = only_if(live, acc, cfg)
        m_i = gl.where(live, m_i, float("-inf"))
        l_i = gl.where(live, l_i, 0.0)
    return acc, m_i, l_i, n


@gluon.jit
def plain_tile(
    q, mem, n, steps, passed, context, at, consumer, L: gl.constexpr, OUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """The same, one after the other."""
    pass_over_keys(mem, n, passed[0], consumer, cfg)
    n = pass_over_values(mem, n, passed[0], cfg)
    acc, m_i, l_i = empty_state(L, OUT, cfg)
    pieces = look_up_ahead(mem, n, steps > 0, context, cfg)
    for i in range(0, steps):
        slot, phase = slot_of(n, cfg), phase_of(n, cfg)
        wait_there(mem, mem.k_full, slot, phase, KEYS_THERE, cfg)
        s = scores(q, mem, n, L, cfg)
        prepared = prepare_step(mem, slot, True, context, pieces, L, cfg)
        s = arrived(0, s, cfg)
        leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
        weights, m_i, l_i, alpha, pieces = step_weights(
            s, mem, n, i + 1 < steps, prepared, context, (m_i, l_i), at, consumer, L, cfg
        )
        p = carried(weights, OUT, cfg)
        acc = caught_up(acc, alpha, OUT, cfg)
        wait_there(mem, mem.v_full, slot, phase, VALUES_THERE, cfg)
        acc, p = finished(add_output(p, mem, at[5], slot, acc, cfg), p, cfg)
        leave(mem, mem.v_empty, slot, VALUES_LEFT, cfg)
        n += 1
    pass_over_keys(mem, n, passed[1], consumer, cfg)
    n = pass_over_values(mem, n, passed[1], cfg)
    return acc, m_i, l_i, n
