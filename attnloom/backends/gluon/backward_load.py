"""The producer warp of the backward: TMA copies of a tile's keys once, then of every step's
queries, output gradients and row statistics, as ring slots become empty. Glossary:
backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_jobs import give_job
from attnloom.backends.gluon.backward_shared import (
    HALF,
    KEYS,
    LINES,
    all_steps,
    entries_of,
    find_tile,
    keys_slot,
    num_tiles_of,
    placed,
    unit_of,
)
from attnloom.backends.gluon.backward_slots import end_loads, wait_for_do, wait_for_q
from attnloom.backends.gluon.backward_sweep import line_of
from attnloom.backends.gluon.rings import box, phase_of, put, slot_of


@gluon.jit
def _load_step(q_desc, do_desc, stats, mem, at, b, h, row, entry, partial, n, cfg: gl.constexpr):
    """entry: of the lists, SWEEPS."""
    M: gl.constexpr = cfg.TILE_M
    slot, phase = slot_of(n, cfg), phase_of(n, cfg) ^ 1
    line = (b * at.heads + h) * at.pitch + row
    if cfg.STEPS_PAST_END:
        line = gl.where(row < at.q_len, line, at.spare)
    full = mem.q_full.index(slot)
    wait_for_q(mem, slot, phase, cfg)
    put(mem.tags.index(slot), row * 2 + partial)
    if cfg.SWEEPS:
        first_row = (b * at.heads + h) * at.q_len
        put(mem.lines.index(n & (LINES - 1)), line_of(first_row, row, at.q_len, entry))
    else:
        put(mem.lines.index(n & (LINES - 1)), line)
    mbarrier.expect(full, M * cfg.PANELS * cfg.D * 2 + M * 4)
    for i in gl.static_range(cfg.PANELS):
        panel = box(mem.q.index(slot * cfg.PANELS + i), M, cfg.D, cfg)
        bi.async_load(q_desc, [b, h, row, i * cfg.D], full, panel)
    bi.async_load(stats, [0, line], full, _line_of(mem.lse.index(slot), cfg))
    full = mem.do_full.index(slot)
    wait_for_do(mem, slot, phase, cfg)
    mbarrier.expect(full, M * cfg.VALUE_PANELS * cfg.DV * 2 + M * 4)
    for i in gl.static_range(cfg.VALUE_PANELS):
        panel = box(mem.dout.index(slot * cfg.VALUE_PANELS + i), M, cfg.DV, cfg)
        bi.async_load(do_desc, [b, h, row, i * cfg.DV], full, panel)
    bi.async_load(stats, [1, line], full, _line_of(mem.delta.index(slot), cfg))


@gluon.jit
def _line_of(row, cfg: gl.constexpr):
    return bi.reinterpret(row, gl.float32, [1, cfg.TILE_M], gl.NVMMASharedLayout(0, 32, 2))


@gluon.jit
def _load_keys(k_desc, v_desc, mem, at, num, cfg: gl.constexpr):
    """Keys and values of the num-th tile. Their place is free once its job could be given."""
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    slot = keys_slot(num, cfg)
    full = mem.kv_full.index(slot)
    mbarrier.expect(full, 2 * HALF * (P * cfg.D + VP * cfg.DV) * 2)
    for i in gl.static_range(2):
        row = at.start + i * HALF
        for j in gl.static_range(P):
            panel = box(mem.k.index((slot * 2 + i) * P + j), HALF, cfg.D, cfg)
            bi.async_load(k_desc, [at.b_kv, at.h_kv, row, j * cfg.D], full, panel)
        for j in gl.static_range(VP):
            panel = box(mem.v.index((slot * 2 + i) * VP + j), HALF, cfg.DV, cfg)
            bi.async_load(v_desc, [at.b_kv, at.h_kv, row, j * cfg.DV], full, panel)


@gluon.jit
def _load_steps(q_desc, do_desc, stats, mem, at, n, cfg: gl.constexpr):
    """All steps of a tile, the first of which is number n; the number after the last."""
    # keys past KV_LEN are zeros, whose exponents may be infinite
    overhangs = (at.start + KEYS > at.kv_len).to(gl.int32) if cfg.HAS_TAIL else 0
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
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, 0, partial, n, cfg)
                n += 1
        else:
            for row in range(0, at.q_len, cfg.TILE_M):
                partial = 1 if cfg.HAS_MASK else overhangs
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, 0, partial, n, cfg)
                n += 1
    return n


@gluon.jit
def load_tile(q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg: gl.constexpr):
    """The partition of the producer in a program of one tile."""
    _load_keys(k_desc, v_desc, mem, at, 0, cfg)
    _load_steps(q_desc, do_desc, stats, mem, at, bi.scalar(0, gl.int32), cfg)
    end_loads(mem, cfg)


@gluon.jit
def _load_swept(q_desc, do_desc, stats, mem, at, ends, entry, n, cfg: gl.constexpr):
    """All steps of a tile, the first of which is number n and has this entry; the number after the
    last, and the entry of the next tile's first step. ends: of its entries, which those of the next
    tile follow."""
    overhangs = (at.start + KEYS > at.kv_len).to(gl.int32) if cfg.HAS_TAIL else 0
    for t in range(ends[0] * cfg.SUB, ends[1] * cfg.SUB):
        row = ((entry >> 3) * cfg.SUB + (t & (cfg.SUB - 1)).to(gl.int32)) * cfg.TILE_M
        following = gl.load(at.entries + (t + 1) // cfg.SUB)
        b, h, partial = at.b_kv, at.h_kv, (entry & 1) | overhangs
        _load_step(q_desc, do_desc, stats, mem, at, b, h, row, entry, partial, n, cfg)
        entry = following
        n += 1
    return n, entry


@gluon.jit
def _load_heads(q_desc, do_desc, k_desc, v_desc, stats, mem, plan, counter, cfg: gl.constexpr):
    """The producer of a program that draws heads: where entries end is asked for a tile ahead."""
    num_tiles, heads, heads_kv = plan[0], plan[2], plan[3]
    n = 0
    num = 0
    t = gl.atomic_add(counter, 1, sem="relaxed")
    while t < heads:
        b, h = t // heads_kv, t % heads_kv
        at = placed(plan, (0, b, h), cfg)
        edges = at.offsets + (b * at.step_b + h * at.step_h) * at.key_blocks
        first, last = gl.load(edges), gl.load(edges + 1)
        entry = gl.load(at.entries + first)
        for tile in range(0, num_tiles):
            after = gl.load(edges + gl.minimum(tile + 2, num_tiles))
            at = placed(plan, (tile, b, h), cfg)
            give_job(mem, num, tile, b, h, ((last - first) * cfg.SUB).to(gl.int32))
            _load_keys(k_desc, v_desc, mem, at, num, cfg)
            n, entry = _load_swept(q_desc, do_desc, stats, mem, at, (first, last), entry, n, cfg)
            first, last = last, after
            num += 1
        t = gl.atomic_add(counter, 1, sem="relaxed")
    give_job(mem, num, -1, 0, 0, 0)
    end_loads(mem, cfg)
    if t == heads + gl.num_programs(0) - 1:
        # the last draw of the launch puts the counter back
        gl.store(counter, 0)


@gluon.jit
def load_tiles(q_desc, do_desc, k_desc, v_desc, stats, mem, plan, mine, counter, cfg: gl.constexpr):
    """The partition of the producer. mine: what `find_tile` found for a program that has one
    tile. PERSISTENT: tiles are drawn from a counter, each once all copies of the one before are
    asked for, which consumers are steps behind."""
    if cfg.SWEEPS:
        _load_heads(q_desc, do_desc, k_desc, v_desc, stats, mem, plan, counter, cfg)
    elif cfg.PERSISTENT:
        total = num_tiles_of(plan)
        n = 0
        num = 0
        t = gl.atomic_add(counter, 1, sem="relaxed")
        while t < total:
            found = find_tile(plan, t, cfg)
            at = placed(plan, found, cfg)
            give_job(mem, num, found[0], at.b_kv, at.h_kv, all_steps(at, cfg))
            _load_keys(k_desc, v_desc, mem, at, num, cfg)
            n = _load_steps(q_desc, do_desc, stats, mem, at, n, cfg)
            num += 1
            t = gl.atomic_add(counter, 1, sem="relaxed")
        give_job(mem, num, -1, 0, 0, 0)
        end_loads(mem, cfg)
        if t == total + gl.num_programs(0) - 1:
            # the last draw of the launch puts the counter back
            gl.store(counter, 0)
    else:
        at = placed(plan, mine, cfg)
        load_tile(q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg)
