"""Buffers of backward_wide.py, and the warp that fills them by TMA, as backward_load.py does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_load import line_of, load_all_steps
from attnloom.backends.gluon.backward_shared import (
    HALF,
    LINES,
)
from attnloom.backends.gluon.rings import box, phase_of, put, slot_of

_Memory = gl.shared_memory_descriptor


@aggregate
class Shared:
    """Tiles and barriers in shared memory, as those of backward_shared.py. k, v, q, dout: a panel
    each, PANELS or VALUE_PANELS side by side."""

    k: _Memory
    v: _Memory
    q: _Memory
    dout: _Memory
    ds: _Memory
    lse: _Memory
    delta: _Memory
    tags: _Memory
    lines: _Memory
    kv_full: _Memory
    q_full: _Memory
    q_empty: _Memory
    do_full: _Memory
    do_empty: _Memory
    ds_full: _Memory
    ds_empty: _Memory

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, dout, ds, lse, delta, tags, lines, kv_full, q_full, q_empty, do_full,
        do_empty, ds_full, ds_empty,
    ):  # fmt: skip
        self.k, self.v, self.q, self.dout, self.ds = k, v, q, dout, ds
        self.lse, self.delta, self.tags, self.lines = lse, delta, tags, lines
        self.kv_full, self.q_full, self.q_empty = kv_full, q_full, q_empty
        self.do_full, self.do_empty = do_full, do_empty
        self.ds_full, self.ds_empty = ds_full, ds_empty


@gluon.jit
def allocate(cfg: gl.constexpr):
    M: gl.constexpr = cfg.TILE_M
    S: gl.constexpr = cfg.STAGES
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    mem = Shared(
        gl.allocate_shared_memory(cfg.OPERAND, [2 * P, HALF, cfg.D], TILES),
        gl.allocate_shared_memory(cfg.OPERAND, [2 * VP, HALF, cfg.DV], TILES),
        gl.allocate_shared_memory(cfg.OPERAND, [S * P, M, cfg.D], TILES),
        gl.allocate_shared_memory(cfg.OPERAND, [S * VP, M, cfg.DV], TILES),
        gl.allocate_shared_memory(cfg.OPERAND, [4, HALF, M], TILES),
        gl.allocate_shared_memory(gl.float32, [S, M], ROWS),
        gl.allocate_shared_memory(gl.float32, [S, M], ROWS),
        gl.allocate_shared_memory(gl.int32, [S, 1], SCALARS),
        gl.allocate_shared_memory(gl.int32, [LINES, 1], SCALARS),
        gl.allocate_shared_memory(gl.int64, [1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
    )
    mbarrier.init(mem.kv_full, count=1)
    for i in gl.static_range(S):
        mbarrier.init(mem.q_full.index(i), count=1)
        mbarrier.init(mem.q_empty.index(i), count=2)
        mbarrier.init(mem.do_full.index(i), count=1)
        mbarrier.init(mem.do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(mem.ds_full.index(i), count=2)
        mbarrier.init(mem.ds_empty.index(i), count=2)
    fence_async_shared()
    return mem


@gluon.jit
def _load_keys(k_desc, v_desc, mem, at, cfg: gl.constexpr):
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    mbarrier.expect(mem.kv_full, 2 * HALF * (P * cfg.D + VP * cfg.DV) * 2)
    for i in gl.static_range(2):
        row = at.start + i * HALF
        for j in gl.static_range(P):
            panel = box(mem.k.index(i * P + j), HALF, cfg.D, cfg)
            bi.async_load(k_desc, [at.b_kv, at.h_kv, row, j * cfg.D], mem.kv_full, panel)
        for j in gl.static_range(VP):
            panel = box(mem.v.index(i * VP + j), HALF, cfg.DV, cfg)
            bi.async_load(v_desc, [at.b_kv, at.h_kv, row, j * cfg.DV], mem.kv_full, panel)


@gluon.jit
def _load_step(q_desc, do_desc, stats, mem, at, b, h, row, partial, n, cfg: gl.constexpr):
    M: gl.constexpr = cfg.TILE_M
    slot, phase = slot_of(n, cfg), phase_of(n, cfg) ^ 1
    line = (b * at.heads + h) * at.pitch + row
    full = mem.q_full.index(slot)
    mbarrier.wait(mem.q_empty.index(slot), phase)
    put(mem.tags.index(slot), row * 2 + partial)
    put(mem.lines.index(n & (LINES - 1)), line)
    mbarrier.expect(full, M * cfg.PANELS * cfg.D * 2 + M * 4)
    for i in gl.static_range(cfg.PANELS):
        panel = box(mem.q.index(slot * cfg.PANELS + i), M, cfg.D, cfg)
        bi.async_load(q_desc, [b, h, row, i * cfg.D], full, panel)
    bi.async_load(stats, [0, line], full, line_of(mem.lse.index(slot), cfg))
    full = mem.do_full.index(slot)
    mbarrier.wait(mem.do_empty.index(slot), phase)
    mbarrier.expect(full, M * cfg.VALUE_PANELS * cfg.DV * 2 + M * 4)
    for i in gl.static_range(cfg.VALUE_PANELS):
        panel = box(mem.dout.index(slot * cfg.VALUE_PANELS + i), M, cfg.DV, cfg)
        bi.async_load(do_desc, [b, h, row, i * cfg.DV], full, panel)
    bi.async_load(stats, [1, line], full, line_of(mem.delta.index(slot), cfg))


@gluon.jit
def load_steps(q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg: gl.constexpr):
    """The partition of the producer."""
    _load_keys(k_desc, v_desc, mem, at, cfg)
    load_all_steps(q_desc, do_desc, stats, mem, at, bi.scalar(0, gl.int32), _load_step, cfg)
