"""Steps of a tile that a consumer of the forward passes over.

SKIPS: a consumer all of whose queries lie past the last one takes part in no step of its tile.
SKIPS_ENDS: lists are joined (merged_lists.py), and a consumer that has no block in the first or in
the last step of its tile passes over that one, but for a step that would be its only one. Scores of
such a step are -inf, which leaves maxima, sums and output as they are, so that results are the same
bits. Steps between them are taken with a mask: those are few, and a branch around a step's products
would take registers.

Whoever passes over a step waits until it is there, for a slot that is given back before would be
what was there before; gives back its keys and values; and takes its turn, if steps have one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    KEYS_THERE,
    VALUES_LEFT,
    VALUES_THERE,
    leave,
    leave_if,
    leave_turn_if,
    phase_of,
    slot_of,
    wait_there,
    wait_there_if,
)

_LIVE = gl.constexpr(0b101010)  # of an entry's flags, those that say whose block is live


@gluon.jit
def dead_ends(lists, first, last, entry, cfg: gl.constexpr):
    """The producer's part. Of consumer c, bits 2c and 2c + 1: whether it has no block in the first
    step of a tile and in the last. entry: of the first."""
    if cfg.SKIPS_ENDS:
        closing = gl.load(lists[0] + (last - 1), mask=first < last, other=0)
        return ((~entry & _LIVE) >> 1) | (~closing & _LIVE)
    else:
        return 0


@gluon.jit
def own_steps(steps, dead, consumer, row, q_len, cfg: gl.constexpr):
    """(steps of a tile that a consumer takes part in, (whether it passes over the one before them
    and the one behind them), steps that it passes over if it has no query). dead: of `dead_ends`.
    row: its first query."""
    leads, trails, idle = False, False, 0
    if cfg.SKIPS:
        idle = gl.where(row >= q_len, steps, 0)
        steps -= idle
    if cfg.SKIPS_ENDS:
        flags = dead >> (2 * consumer)
        trails = (flags & 2 != 0) & (steps > 1)
        steps -= trails.to(gl.int32)
        leads = (flags & 1 != 0) & (steps > 1)
        steps -= leads.to(gl.int32)
    return steps, (leads, trails), idle


@gluon.jit
def pass_over_keys(mem, n, live, consumer, cfg: gl.constexpr):
    """Those of step n and its turn, if `live`."""
    if cfg.SKIPS_ENDS:
        slot = slot_of(n, cfg)
        wait_there_if(live, mem, mem.k_full, slot, phase_of(n, cfg), KEYS_THERE, cfg)
        leave_if(live, mem, mem.k_empty, slot, KEYS_LEFT, cfg)
        leave_turn_if(live, consumer, cfg)


@gluon.jit
def pass_over_values(mem, n, live, cfg: gl.constexpr):
    """Those of step n, if `live`; the number of the next step."""
    if cfg.SKIPS_ENDS:
        slot = slot_of(n, cfg)
        wait_there_if(live, mem, mem.v_full, slot, phase_of(n, cfg), VALUES_THERE, cfg)
        leave_if(live, mem, mem.v_empty, slot, VALUES_LEFT, cfg)
        n += live.to(gl.int32)
    return n


@gluon.jit
def pass_over_all(mem, n, steps, consumer, cfg: gl.constexpr):
    """So many steps of a tile, the first of which has no turn; the number of the next step."""
    if cfg.SKIPS:
        for i in range(0, steps):
            slot, phase = slot_of(n, cfg), phase_of(n, cfg)
            wait_there(mem, mem.k_full, slot, phase, KEYS_THERE, cfg)
            leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
            leave_turn_if(i > 0, consumer, cfg)
            wait_there(mem, mem.v_full, slot, phase, VALUES_THERE, cfg)
            leave(mem, mem.v_empty, slot, VALUES_LEFT, cfg)
            n += 1
    return n
