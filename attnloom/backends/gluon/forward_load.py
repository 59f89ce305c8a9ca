"""The producer warp of the forward: draws tiles, and copies their queries, keys and values.

Tiles are drawn from a counter in memory, so that a program that is done early takes more. They are
numbered as in backends/triton/forward.py: within heads that share the L2 cache, tiles with most
live blocks first. What a tile needs from memory before its first copy is read while the copies of
the tile before are under way; the draw itself is waited for in between (drawn two tiles ahead, it
cost up to 4%, H200). Glossary: forward_shared.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_boxes import entries_at, load_boxes, steps_of
from attnloom.backends.gluon.forward_passed import dead_ends
from attnloom.backends.gluon.forward_shared import (
    FLAG_BITS,
    give_job,
    key_tile,
    query_phase,
    query_slot,
)
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    VALUES_LEFT,
    box,
    key_panel,
    put,
    slot_of,
    wait_left,
)


@gluon.jit
def _load_step(k_desc, v_desc, mem, b, h, tag, n, cfg: gl.constexpr):
    N: gl.constexpr = cfg.TILE_N
    slot = slot_of(n, cfg)
    row = key_tile(tag, cfg) * N
    full = mem.k_full.index(slot)
    SHORT: gl.constexpr = cfg.KEY_PANELS < cfg.STAGES * cfg.PANELS
    if not SHORT:
        wait_left(mem.k_empty, n, KEYS_LEFT, cfg)
    if cfg.NEEDS_KEYS:
        put(mem.tags.index(slot), tag)
    if cfg.NUM_COLUMNS > 0:
        mbarrier.arrive(mem.tag_full.index(slot), count=1)
    mbarrier.expect(full, N * cfg.D * 2 * cfg.PANELS)
    for i in gl.static_range(cfg.PANELS):
        if SHORT and i == cfg.PANELS - 1:
            wait_left(mem.k_empty, n + 1, KEYS_LEFT, cfg)
        k_box = box(mem.k.index(key_panel(n, i, cfg)), N, cfg.D, cfg)
        bi.async_load(k_desc, [b, h, row, i * cfg.D], full, k_box)
    full = mem.v_full.index(slot)
    wait_left(mem.v_empty, n, VALUES_LEFT, cfg)
    mbarrier.expect(full, N * cfg.DV * 2 * cfg.PANELS)
    for i in gl.static_range(cfg.PANELS):
        v_box = box(mem.v.index(slot * cfg.PANELS + i), N, cfg.DV, cfg)
        bi.async_load(v_desc, [b, h, row, i * cfg.DV], full, v_box)


@gluon.jit
def _load_query(q_desc, mem, b, h, tile, n, cfg: gl.constexpr):
    for i in gl.static_range(cfg.CONSUMERS):
        slot = query_slot(n, i, cfg)
        full = mem.q_full.index(slot)
        mbarrier.wait(mem.q_empty.index(slot), query_phase(n, cfg) ^ 1)
        mbarrier.expect(full, cfg.ROWS * cfg.D * 2 * cfg.PANELS)
        row = (tile * cfg.CONSUMERS + i) * cfg.ROWS
        for j in gl.static_range(cfg.PANELS):
            q_box = box(mem.q.index(slot * cfg.PANELS + j), cfg.ROWS, cfg.D, cfg)
            bi.async_load(q_desc, [b, h, row, j * cfg.D], full, q_box)


@gluon.jit
def _draw(counter):
    """The number of a program's next tile: without a fence of the warp's memory, after which the
    processor forgets its first-level cache, as no draw says anything of other memory."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def _look_up(lists, plan, t, cfg: gl.constexpr):
    """(tile, b * Hq + h, first and last step) of the t-th tile of the launch."""
    heads, num_tiles, together, units, steps = plan[0], plan[2], plan[3], plan[4], plan[5]
    batch = t // (together * num_tiles)
    width = gl.minimum(units - batch * together, together)
    local = t - batch * together * num_tiles
    tile = local // width
    unit = batch * together + local % width
    first = tile * 0
    last = steps
    if cfg.HAS_LISTS:
        b, h = unit // heads, unit % heads
        listed = b * lists[2] + h * lists[3]
        work = lists[1] + (listed.to(gl.int64) * num_tiles + tile) * 3
        tile = gl.load(work).to(gl.int32)
        first = gl.load(work + 1) * cfg.SUB
        last = gl.load(work + 2) * cfg.SUB
    return tile, unit, first, last


@gluon.jit
def _first_entry(lists, first, last, cfg: gl.constexpr):
    if cfg.STRIPS:
        return entries_at(lists, first, last, cfg)
    elif cfg.HAS_LISTS:
        return gl.load(lists[0] + first // cfg.SUB, mask=first < last, other=0)
    else:
        return 0


@gluon.jit
def _load_keys(
    k_desc, v_desc, lists, mem, b, h, first, last, entry, overhang, n, cfg: gl.constexpr
):
    """The steps first .. last - 1 of a list, `entry` that of the first; the number of the next step
    of the ring."""
    SHIFT: gl.constexpr = FLAG_BITS if cfg.APART else 1
    PARTIAL: gl.constexpr = 21 if cfg.APART else 1  # one bit a consumer
    for t in range(first, last):
        if cfg.HAS_LISTS:
            block = entry >> SHIFT
            tile = block * cfg.SUB + (t & (cfg.SUB - 1)).to(gl.int32)
            flags = entry & ((1 << SHIFT) - 1)
            flags = gl.where(block == overhang, flags | PARTIAL, flags)
            tag = (tile << SHIFT) | flags
            # loaded a step ahead: a load in place would delay the copies by its latency
            entry = gl.load(lists[0] + gl.minimum((t + 1) // cfg.SUB, last // cfg.SUB - 1))
        else:
            tag = t * 2 + (1 if cfg.HAS_MASK else (t == overhang).to(gl.int32))
        _load_step(k_desc, v_desc, mem, b, h, tag, n, cfg)
        n += 1
    return n


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, mem, counter, lists, plan, cfg: gl.constexpr):
    """The partition of the producer. plan = (Hq, GROUP, row tiles, heads of a batch, B * Hq, steps
    without lists, tiles of the launch, kv batch step, what overhangs KV_LEN, KV_LEN if STRIPS)."""
    heads, group, total, step_b, overhang = plan[0], plan[1], plan[6], plan[7], plan[8]
    n = 0
    num_tiles = 0
    t = _draw(counter)
    tile, unit, first, last = _look_up(lists, plan, gl.minimum(t, total - 1), cfg)
    entry = _first_entry(lists, first, last, cfg)
    dead = dead_ends(lists, first, last, entry, cfg)
    while t < total:
        t = _draw(counter)
        b, h = unit // heads, unit % heads
        steps = (steps_of(first, last, cfg) if cfg.STRIPS else last - first).to(gl.int32)
        give_job(mem, num_tiles, tile, unit, steps, dead if cfg.SKIPS_ENDS else steps)
        _load_query(q_desc, mem, b, h, tile, num_tiles, cfg)
        following = _look_up(lists, plan, gl.minimum(t, total - 1), cfg)
        b, h = b * step_b, h // group
        if cfg.STRIPS:
            ends = plan[9], overhang
            n = load_boxes(k_desc, v_desc, lists, mem, b, h, first, last, entry, ends, n, cfg)
        else:
            n = _load_keys(k_desc, v_desc, lists, mem, b, h, first, last, entry, overhang, n, cfg)
        tile, unit, first, last = following
        entry = _first_entry(lists, first, last, cfg)
        dead = dead_ends(lists, first, last, entry, cfg)
        num_tiles += 1
    give_job(mem, num_tiles, -1, 0, 0, 0)
    if t == total + gl.num_programs(0) - 1:
        # the last draw of the launch puts the counter back
        gl.store(counter, 0)
