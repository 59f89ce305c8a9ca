"""The producer warp of the backward: TMA copies of a program's keys once, then of every step's
queries, output gradients and row statistics, as ring slots become empty. Glossary:
backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_shared import HALF, KEYS, LINES, entries_of, unit_of
from attnloom.backends.gluon.rings import box, phase_of, put, slot_of


@gluon.jit
def _load_step(q_desc, do_desc, stats, mem, at, b, h, row, partial, n, cfg: gl.constexpr):
    M: gl.constexpr = cfg.TILE_M
    slot, phase = slot_of(n, cfg), phase_of(n, cfg) ^ 1
    line = (b * at.heads + h) * at.pitch + row
    # a block may reach past Q_LEN by whole steps, whose statistics would be another head's
    line = gl.where(row < at.q_len, line, at.spare)
    full = mem.q_full.index(slot)
    mbarrier.wait(mem.q_empty.index(slot), phase)
    put(mem.tags.index(slot), row * 2 + partial)
    put(mem.lines.index(n & (LINES - 1)), line)
    mbarrier.expect(full, M * cfg.D * 2 + M * 4)
    q_box = box(mem.q.index(slot), M, cfg.D, cfg)
    bi.async_load(q_desc, [b, h, row, 0], full, q_box)
    bi.async_load(stats, [0, line], full, _line(mem.lse.index(slot), cfg))
    full = mem.do_full.index(slot)
    mbarrier.wait(mem.do_empty.index(slot), phase)
    mbarrier.expect(full, M * cfg.DV * 2 + M * 4)
    do_box = box(mem.dout.index(slot), M, cfg.DV, cfg)
    bi.async_load(do_desc, [b, h, row, 0], full, do_box)
    bi.async_load(stats, [1, line], full, _line(mem.delta.index(slot), cfg))


@gluon.jit
def _line(row, cfg: gl.constexpr):
    return bi.reinterpret(row, gl.float32, [1, cfg.TILE_M], gl.NVMMASharedLayout(0, 32, 2))


@gluon.jit
def load_steps(q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg: gl.constexpr):
    """The partition of the producer."""
    mbarrier.expect(mem.kv_full, 2 * HALF * (cfg.D + cfg.DV) * 2)
    for i in gl.static_range(2):
        row = at.start + i * HALF
        k_box = box(mem.k.index(i), HALF, cfg.D, cfg)
        v_box = box(mem.v.index(i), HALF, cfg.DV, cfg)
        bi.async_load(k_desc, [at.b_kv, at.h_kv, row, 0], mem.kv_full, k_box)
        bi.async_load(v_desc, [at.b_kv, at.h_kv, row, 0], mem.kv_full, v_box)
    # keys past KV_LEN are zeros, whose exponents may be infinite
    overhangs = (at.start + KEYS > at.kv_len).to(gl.int32) if cfg.HAS_TAIL else 0
    n = 0
    for unit in range(0, at.units):
        b, h = unit_of(at, unit)
        if cfg.HAS_LISTS:
            first, last = entries_of(at, b, h)
            # loaded a step ahead: a load in place would delay the copies by its latency
            entry = gl.load(at.entries + first, mask=first < last, other=0)
            for t in range(first * cfg.SUB, last * cfg.SUB):
                row = ((entry >> 1) * cfg.SUB + (t & (cfg.SUB - 1)).to(gl.int32)) * cfg.TILE_M
                partial = (entry & 1) | overhangs
                entry = gl.load(at.entries + gl.minimum((t + 1) // cfg.SUB, last - 1))
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, partial, n, cfg)
                n += 1
        else:
            for row in range(0, at.q_len, cfg.TILE_M):
                partial = 1 if cfg.HAS_MASK else overhangs
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, partial, n, cfg)
                n += 1
