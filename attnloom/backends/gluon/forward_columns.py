"""What a mask knows of keys, computed by a warp of its own ahead of the consumers.

A mask that looks up keys (documents, padding) would have each thread of each consumer wait for as
many loads as it has columns, in every partial block. One warp looks up each key once a step while
the products of earlier steps run, and leaves the values in shared memory. Glossary:
forward_shared.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon.forward_shared import all_full, key_tile, take_job
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    VALUES_LEFT,
    get,
    leave,
    phase_of,
    slot_of,
    wait_left,
)


@gluon.jit
def write_columns(mem, heads, kv_offset, mask_args, cfg: gl.constexpr):
    """The partition of that warp."""
    N: gl.constexpr = cfg.TILE_N
    LAYOUT: gl.constexpr = gl.BlockedLayout([N // 32], [32], [1], [0])
    n = 0
    num_tiles = 0
    tile, unit, steps, _ = take_job(mem, 0, cfg)
    while tile >= 0:
        b, h = unit // heads, unit % heads
        head = cfg.MASK_HEAD(mask_args, b, h)
        for _ in range(0, steps):
            slot = slot_of(n, cfg)
            mbarrier.wait(mem.tag_full.index(slot), phase_of(n, cfg))
            tag = get(mem.tags.index(slot))
            # what was there is read until the step that it belonged to is over
            wait_left(mem.v_empty, n, VALUES_LEFT, cfg)
            if not all_full(tag, cfg):
                keys = key_tile(tag, cfg) * N + gl.arange(0, N, LAYOUT) + kv_offset
                values = cfg.MASK_COLUMN(mask_args, head, b, h, keys)
                mem.column0.index(slot).store(values[0].to(cfg.COLUMN0))
                if cfg.NUM_COLUMNS > 1:
                    mem.column1.index(slot).store(values[1].to(cfg.COLUMN1))
            mbarrier.arrive(mem.column_full.index(slot))
            # Both rings wait for this warp: consumers ask for columns in partial blocks alone, so
            # that they could be two phases of a barrier ahead of it, which is no phase at all.
            leave(mem, mem.k_empty, slot, KEYS_LEFT, cfg)
            if not cfg.NAMED:
                leave(mem, mem.v_empty, slot, VALUES_LEFT, cfg)
            n += 1
        num_tiles += 1
        tile, unit, steps, _ = take_job(mem, num_tiles, cfg)


@gluon.jit
def read_columns(mem, n, L: gl.constexpr, cfg: gl.constexpr):
    """The values of step n as `MASK_COLUMN` gives them."""
    slot = slot_of(n, cfg)
    mbarrier.wait(mem.column_full.index(slot), phase_of(n, cfg))
    first = _looked_up(mem.column0.index(slot), L, cfg.COLUMN0)
    if cfg.NUM_COLUMNS > 1:
        return first, _looked_up(mem.column1.index(slot), L, cfg.COLUMN1)
    else:
        return (first,)


@gluon.jit
def _looked_up(src, L: gl.constexpr, TYPE: gl.constexpr):
    """What a warp looked up for dimension 1 of scores in layout L; bool was left as int8."""
    found = src.load(gl.SliceLayout(0, L))
    if gl.int8 == TYPE:
        return found != 0
    else:
        return found
