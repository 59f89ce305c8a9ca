"""What the warps of a backward program share: buffers, barriers and where the program is.

Glossary, beyond backends/triton/backward.py
    consumer     a warpgroup (4 warps) that owns HALF of a program's 128 keys
    step         TILE_M queries of one head against the program's keys
    ring, slot, phase    see rings.py
    tag          of a step: its first query * 2 + whether the mask is to be applied
    line         of a step: where its row statistics and its part of dq start, in rows
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import addresses
from attnloom.backends.gluon.builtins import async_store, barrier
from attnloom.backends.gluon.rings import box
from attnloom.backends.triton.device_math import whole32

KEYS = gl.constexpr(128)  # of a program
HALF = gl.constexpr(64)  # of a consumer
PART = gl.constexpr(32)  # columns of each of the three parts of dk and dv; NATIVE
# BY_WARP: places of barriers in their block (addresses.py), four each.
KV_THERE = gl.constexpr(0)
Q_THERE = gl.constexpr(4)
DO_THERE = gl.constexpr(8)
Q_LEFT = gl.constexpr(12)
DO_LEFT = gl.constexpr(16)
DS_THERE = gl.constexpr(20)
DS_LEFT = gl.constexpr(24)
JOBS_THERE = gl.constexpr(28)
JOBS_LEFT = gl.constexpr(32)
LINES = gl.constexpr(8)  # slots of `lines`: more than steps can be in flight

_Memory = gl.shared_memory_descriptor


@aggregate
class Shared:
    """Tiles and barriers in shared memory.

    k, v: [KV_STAGES * 2, HALF, D], slot * 2 + consumer; also where dk and dv leave from.
    q, dout: [STAGES, TILE_M, D]. Heads in panels have PANELS or VALUE_PANELS entries for each of
    these, side by side. lse, delta: [STAGES, TILE_M]. tags: [STAGES, 1]. lines: [LINES, 1].
    ds: [4, HALF, TILE_M], slot * 2 + consumer. ds_empty is for whoever computes dq to say.
    NAMED has fewer of these barriers, see backward_slots.py. block: address of all, BY_WARP.
    jobs: [2, 4], see backward_jobs.py. q_at, dout_at: addresses, NATIVE.
    """

    k: _Memory
    v: _Memory
    q: _Memory
    dout: _Memory
    ds: _Memory
    lse: _Memory
    delta: _Memory
    tags: _Memory
    lines: _Memory
    jobs: _Memory
    kv_full: _Memory
    q_full: _Memory
    q_empty: _Memory
    do_full: _Memory
    do_empty: _Memory
    ds_full: _Memory
    ds_empty: _Memory
    job_full: _Memory
    job_empty: _Memory
    block: gl.tensor
    q_at: gl.tensor
    dout_at: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, dout, ds, lse, delta, tags, lines, jobs, kv_full, q_full, q_empty, do_full,
        do_empty, ds_full, ds_empty, job_full, job_empty, block, q_at, dout_at,
    ):  # fmt: skip
        self.k, self.v, self.q, self.dout, self.ds = k, v, q, dout, ds
        self.lse, self.delta, self.tags, self.lines, self.jobs = lse, delta, tags, lines, jobs
        self.kv_full, self.q_full, self.q_empty = kv_full, q_full, q_empty
        self.do_full, self.do_empty = do_full, do_empty
        self.ds_full, self.ds_empty = ds_full, ds_empty
        self.job_full, self.job_empty = job_full, job_empty
        self.block, self.q_at, self.dout_at = block, q_at, dout_at


@aggregate
class Place:
    """Which keys a tile has, and whose queries visit them.

    b_kv, h_kv, start: batch entry, head and first key. block: key block of the mask.
    units: pairs (b, h) that read these keys: `group` heads for each batch entry of the query.
    heads, pitch, spare: line = (b * heads + h) * pitch + row; `spare` is that of TILE_M rows that
        are nobody's, for steps past Q_LEN. offsets, entries, step_b, step_h, key_blocks: the
        transposed mask, see launch_backward.py; unused without one.
    """

    b_kv: gl.tensor
    h_kv: gl.tensor
    start: gl.tensor
    block: gl.tensor
    units: gl.tensor
    group: gl.tensor
    heads: gl.tensor
    pitch: gl.tensor
    spare: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    offsets: gl.tensor
    entries: gl.tensor
    step_b: gl.tensor
    step_h: gl.tensor
    key_blocks: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, b_kv, h_kv, start, block, units, group, heads, pitch, spare, q_len, kv_len, offsets,
        entries, step_b, step_h, key_blocks,
    ):  # fmt: skip
        self.b_kv, self.h_kv, self.start, self.block = b_kv, h_kv, start, block
        self.units, self.group, self.heads = units, group, heads
        self.pitch, self.spare, self.q_len, self.kv_len = pitch, spare, q_len, kv_len
        self.offsets, self.entries = offsets, entries
        self.step_b, self.step_h, self.key_blocks = step_b, step_h, key_blocks


@gluon.jit
def keys_slot(num, cfg: gl.constexpr):
    """Where the keys and values of a program's num-th tile lie."""
    return num & (cfg.KV_STAGES - 1)


@gluon.jit
def keys_phase(num, cfg: gl.constexpr):
    return (num >> (cfg.KV_STAGES - 1)) & 1


@gluon.jit
def allocate(cfg: gl.constexpr):
    M: gl.constexpr = cfg.TILE_M
    S: gl.constexpr = cfg.STAGES
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KV: gl.constexpr = cfg.KV_STAGES
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    # Memory of barriers that nobody used later would be given to other things, while they are
    # barriers still: an interrupted program then reads other values than it wrote there (H200).
    ALONE: gl.constexpr = not cfg.PERSISTENT
    tags = gl.allocate_shared_memory(gl.int32, [S, 1], SCALARS)
    q_empty, do_empty, ds_full, ds_empty = tags, tags, tags, tags
    BLOCK: gl.constexpr = cfg.BY_WARP
    block = tags
    if BLOCK:
        block = addresses.new_block()
    if not cfg.NATIVE:
        block_at = addresses.find(block, block, BLOCK, False)[0]
    if cfg.NAMED < 1:
        q_empty = addresses.barriers(block, Q_LEFT, S, BLOCK)
        do_empty = addresses.barriers(block, DO_LEFT, S, BLOCK)
    if cfg.NAMED < 2:
        ds_full = addresses.barriers(block, DS_THERE, 2, BLOCK)
    if cfg.NAMED < 3:
        ds_empty = addresses.barriers(block, DS_LEFT, 2, BLOCK)
    k = gl.allocate_shared_memory(cfg.OPERAND, [KV * 2 * P, HALF, cfg.D], TILES)
    v = gl.allocate_shared_memory(cfg.OPERAND, [KV * 2 * VP, HALF, cfg.DV], TILES)
    q = gl.allocate_shared_memory(cfg.OPERAND, [S * P, M, cfg.D], TILES)
    dout = gl.allocate_shared_memory(cfg.OPERAND, [S * VP, M, cfg.DV], TILES)
    q_at, dout_at = 0, 0
    if cfg.NATIVE:
        block_at, q_at = addresses.find(block, q.index(0), BLOCK, True)
        dout_at = addresses.find(block, dout.index(0), False, True)[1]
    mem = Shared(
        k,
        v,
        q,
        dout,
        gl.allocate_shared_memory(cfg.OPERAND, [4, HALF, M], TILES),
        gl.allocate_shared_memory(gl.float32, [S, M], ROWS),
        gl.allocate_shared_memory(gl.float32, [S, M], ROWS),
        tags,
        gl.allocate_shared_memory(gl.int32, [LINES, 1], SCALARS),
        tags if ALONE else gl.allocate_shared_memory(gl.int32, [2, 4], SCALARS),
        addresses.barriers(block, KV_THERE, KV, BLOCK),
        addresses.barriers(block, Q_THERE, S, BLOCK),
        q_empty,
        addresses.barriers(block, DO_THERE, S, BLOCK),
        do_empty,
        ds_full,
        ds_empty,
        tags if ALONE else addresses.barriers(block, JOBS_THERE, 2, BLOCK),
        tags if ALONE else addresses.barriers(block, JOBS_LEFT, 2, BLOCK),
        block_at,
        q_at,
        dout_at,
    )
    WARPS: gl.constexpr = 4 if cfg.BY_WARP else 1  # of a group that arrive
    for i in gl.static_range(KV):
        mbarrier.init(mem.kv_full.index(i), count=1)
    for i in gl.static_range(S):
        mbarrier.init(mem.q_full.index(i), count=1)
        mbarrier.init(mem.do_full.index(i), count=1)
        if cfg.NAMED < 1:
            mbarrier.init(mem.q_empty.index(i), count=2 * WARPS)
            mbarrier.init(mem.do_empty.index(i), count=2 * WARPS)
    for i in gl.static_range(2):
        if cfg.NAMED < 2:
            mbarrier.init(mem.ds_full.index(i), count=2 * WARPS)
        if cfg.NAMED < 3:
            mbarrier.init(mem.ds_empty.index(i), count=(1 if cfg.DQ_APART else 2) * WARPS)
        if not ALONE:
            mbarrier.init(mem.job_full.index(i), count=1)
            mbarrier.init(mem.job_empty.index(i), count=3 if cfg.DQ_APART else 2)
    fence_async_shared()
    return mem


@gluon.jit
def plan_of(lists, shape):
    """What all tiles of a launch have in common, in the order of `find_tile` and `placed`.

    shape = (Hq, Hkv, GROUP, Q_LEN, KV_LEN, B, key tiles, q_offset, kv_offset, heads of a batch,
    units, Bkv * Hkv, PITCH)."""
    heads, pitch = whole32(shape, 0), whole32(shape, 36)
    spare = whole32(shape, 15) * heads * pitch
    return (
        whole32(shape, 18), whole32(shape, 27), whole32(shape, 33), whole32(shape, 3),
        whole32(shape, 6), whole32(shape, 30), heads, pitch, spare, whole32(shape, 9),
        whole32(shape, 12), lists[0], lists[1], lists[2], whole32(lists, 3), whole32(lists, 6),
        whole32(lists, 9),
    )  # fmt: skip


@gluon.jit
def find_tile(plan, t, cfg: gl.constexpr):
    """(key tile, b_kv, h_kv) of the t-th tile of a launch. Tiles are numbered as in
    backends/triton/backward_keys.py: within heads that share the L2 cache, those with most live
    rows first."""
    num_tiles, together, kv_units, heads_kv, group = plan[0], plan[1], plan[2], plan[3], plan[4]
    batch = t // (together * num_tiles)
    width = gl.minimum(kv_units - batch * together, together)
    local = t - batch * together * num_tiles
    tile = local // width
    index = batch * together + local % width
    b_kv, h_kv = index // heads_kv, index % heads_kv
    if cfg.HAS_LISTS:
        work, step_b, step_h = plan[13], plan[14], plan[15]
        unit = b_kv * step_b + h_kv * group * step_h
        tile = gl.load(work + (unit * num_tiles + tile) * 3).to(gl.int32)
    return tile, b_kv, h_kv


@gluon.jit
def placed(plan, found, cfg: gl.constexpr):
    """The Place of a tile that `find_tile` found."""
    tile, b_kv, h_kv = found
    return Place(
        b_kv, h_kv, tile * KEYS, tile // cfg.TILES_PER_BLOCK, plan[5],
        plan[4], plan[6], plan[7], plan[8], plan[9], plan[10], plan[11], plan[12], plan[14],
        plan[15], plan[16],
    )  # fmt: skip


@gluon.jit
def num_tiles_of(plan):
    """Tiles of a launch."""
    return plan[0] * plan[2]


@gluon.jit
def unit_of(at, unit):
    """The (b, h) of a unit."""
    return at.b_kv + unit // at.group, at.h_kv * at.group + unit % at.group


@gluon.jit
def entries_of(at, b, h):
    """First and last entry + 1 of a head's live blocks of queries."""
    where = (b * at.step_b + h * at.step_h) * at.key_blocks + at.block
    return gl.load(at.offsets + where), gl.load(at.offsets + where + 1)


@gluon.jit
def steps_of(at, unit, cfg: gl.constexpr):
    """Number of steps of a unit."""
    if cfg.HAS_LISTS:
        b, h = unit_of(at, unit)
        first, last = entries_of(at, b, h)
        return ((last - first) * cfg.SUB).to(gl.int32)
    else:
        return (at.q_len + (cfg.TILE_M - 1)) // cfg.TILE_M


@gluon.jit
def all_steps(at, cfg: gl.constexpr):
    """Number of steps of all units."""
    total = 0
    if cfg.SAME_LISTS:
        total += steps_of(at, 0, cfg) * at.units
    else:
        for unit in range(0, at.units):
            total += steps_of(at, unit, cfg)
    return total


@gluon.jit
def parts_of(at, cfg: gl.constexpr):
    """Number of parts of a tile that have contexts of their own: units, or all at once."""
    if cfg.BY_HEAD:
        return at.units
    else:
        return 1


@gluon.jit
def steps_in(at, part, total, cfg: gl.constexpr):
    """Number of steps of a part."""
    if cfg.BY_HEAD:
        return steps_of(at, part, cfg)
    else:
        return total


@gluon.jit
def leave(desc, tiles, first, panels, scale, place, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """A consumer's dk or dv, scaled, to memory by way of its keys' or values' place from `first`
    on; NATIVE: parts of one tile. place = (b, h, first row)."""
    b, h, row = place
    for i in gl.static_range(len(panels)):
        if cfg.NATIVE:
            tile = tiles.index(first).slice(i * PART, PART, 1)
        else:
            tile = tiles.index(first + i)
        tile.store((panels[i] * scale).to(cfg.OPERAND))
    fence_async_shared()
    barrier()
    TILES: gl.constexpr = 1 if cfg.NATIVE else len(panels)
    for i in gl.static_range(TILES):
        async_store(desc, [b, h, row, i * WIDTH], box(tiles.index(first + i), HALF, WIDTH, cfg))
