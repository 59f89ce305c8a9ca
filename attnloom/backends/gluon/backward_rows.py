"""What a mask knows of queries, computed by a warp of its own ahead of the consumers.

As forward_columns.py, with queries for keys: a mask that looks up queries (documents) would have
each thread of both consumers wait for 16 loads in every partial step. Glossary: backward_shared.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_jobs import done_with_job, job_of, wait_for_job
from attnloom.backends.gluon.backward_shared import all_steps, placed, unit_of
from attnloom.backends.gluon.rings import get, looked_up, phase_of, slot_of


@gluon.jit
def _rows_of_tile(mem, at, total, n, mask_args, q_offset, cfg: gl.constexpr):
    """Those of all steps of a tile, the first of which is number n; the number after the last."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([cfg.TILE_M // 32], [32], [1], [0])
    # one head stands for all units: where masks tell them apart, consumers look up their queries
    b, h = unit_of(at, 0)
    head = cfg.MASK_HEAD(mask_args, b, h)
    for _ in range(0, total):
        slot = slot_of(n, cfg)
        mbarrier.wait(mem.tag_full.index(slot), phase_of(n, cfg))
        tag = get(mem.tags.index(slot))
        # what was there is read until the step that it belonged to is over
        mbarrier.wait(mem.do_empty.index(slot), phase_of(n, cfg) ^ 1)
        if (tag & 1) != 0:
            queries = (tag >> 1) + gl.arange(0, cfg.TILE_M, LAYOUT) + q_offset
            values = cfg.MASK_ROW(mask_args, head, b, h, queries)
            mem.row0.index(slot).store(values[0].to(cfg.ROW0))
            if cfg.NUM_ROWS > 1:
                mem.row1.index(slot).store(values[1].to(cfg.ROW1))
        mbarrier.arrive(mem.row_full.index(slot))
        # both rings wait for this warp, as forward_columns.py says
        mbarrier.arrive(mem.q_empty.index(slot))
        mbarrier.arrive(mem.do_empty.index(slot))
        n += 1
    return n


@gluon.jit
def write_rows(mem, plan, mine, mask_args, q_offset, cfg: gl.constexpr):
    """The partition of that warp. mine: see `load_tiles`."""
    if cfg.PERSISTENT:
        n = 0
        num = 0
        wait_for_job(mem, 0)
        tile, b_kv, h_kv, total = job_of(mem, 0)
        while tile >= 0:
            at = placed(plan, (tile, b_kv, h_kv), cfg)
            n = _rows_of_tile(mem, at, total, n, mask_args, q_offset, cfg)
            done_with_job(mem, num)
            num += 1
            wait_for_job(mem, num)
            tile, b_kv, h_kv, total = job_of(mem, num)
    else:
        at = placed(plan, mine, cfg)
        total = all_steps(at, cfg)
        _rows_of_tile(mem, at, total, bi.scalar(0, gl.int32), mask_args, q_offset, cfg)


@gluon.jit
def read_rows(mem, n, cfg: gl.constexpr):
    """The values of step n as `MASK_ROW` gives them, along dimension 1 of scores."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    slot = slot_of(n, cfg)
    mbarrier.wait(mem.row_full.index(slot), phase_of(n, cfg))
    first = looked_up(mem.row0.index(slot), L, cfg.ROW0)
    if cfg.NUM_ROWS > 1:
        return first, looked_up(mem.row1.index(slot), L, cfg.ROW1)
    else:
        return (first,)
