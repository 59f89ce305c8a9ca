"""What the warps of a forward program share, and how they tell each other which tile comes next.

Glossary, beyond backends/triton/forward.py
    consumer     WARPS warps that own ROWS queries of a tile, 16 each
    step         TILE_N keys and values against the tile's queries
    ring, slot, phase    see rings.py
    tag          of a step: key tile * 2 + whether the mask is to be applied; APART: as an entry of
                 merged_lists.py, with the key tile in place of the block
    job          of a tile: its number (-1: no more), b * Hq + h, its number of steps
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import configs_forward, merged_lists
from attnloom.backends.gluon.forward_wide import address_of, clear_beginnings

PANEL = gl.constexpr(configs_forward.PANEL)
FLAG_BITS = gl.constexpr(merged_lists.FLAG_BITS)
ALL_FULL = gl.constexpr(0b101010)  # flags of a step that three consumers keep all of, APART

_Memory = gl.shared_memory_descriptor


@aggregate
class Shared:
    """Tiles and barriers in shared memory.

    q: [Q_STAGES * CONSUMERS, ROWS, D]; k: [STAGES, TILE_N, D]; v: [STAGES, TILE_N, DV];
    out: [CONSUMERS, ROWS, DV], where results leave from; each PANELS times, those of a tile side by
    side, but for k if it is short (rings.py). jobs: [2, 4]; tags: [STAGES, 1]; columns: up to two
    of [STAGES, TILE_N], see forward_columns.py. values_at: WIDE, one address, of v.
    """

    q: _Memory
    k: _Memory
    v: _Memory
    out: _Memory
    jobs: _Memory
    tags: _Memory
    values_at: _Memory
    column0: _Memory
    column1: _Memory
    tag_full: _Memory
    column_full: _Memory
    q_full: _Memory
    q_empty: _Memory
    k_full: _Memory
    k_empty: _Memory
    v_full: _Memory
    v_empty: _Memory
    job_full: _Memory
    job_empty: _Memory

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, out, jobs, tags, values_at, column0, column1, tag_full, column_full,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, job_full, job_empty,
    ):  # fmt: skip
        self.q, self.k, self.v, self.out = q, k, v, out
        self.jobs, self.tags, self.values_at = jobs, tags, values_at
        self.column0, self.column1 = column0, column1
        self.tag_full, self.column_full = tag_full, column_full
        self.q_full, self.q_empty = q_full, q_empty
        self.k_full, self.k_empty = k_full, k_empty
        self.v_full, self.v_empty = v_full, v_empty
        self.job_full, self.job_empty = job_full, job_empty


@gluon.jit
def allocate(cfg: gl.constexpr):
    S: gl.constexpr = cfg.STAGES
    C: gl.constexpr = cfg.CONSUMERS
    Q: gl.constexpr = cfg.Q_STAGES * C
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    READERS: gl.constexpr = C + (1 if cfg.NUM_COLUMNS > 0 else 0)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    P: gl.constexpr = cfg.PANELS
    q = gl.allocate_shared_memory(cfg.OPERAND, [Q * P, cfg.ROWS, cfg.D], TILES)
    out = q
    if not cfg.OUT_IN_Q:
        out = gl.allocate_shared_memory(cfg.OPERAND, [C * P, cfg.ROWS, cfg.DV], TILES)
    tags = gl.allocate_shared_memory(gl.int32, [S, 1], SCALARS)
    # Memory of barriers that nobody used later would be given to other things, while they are
    # barriers still: an interrupted program then reads other values than it wrote there (H200).
    column0, column1, tag_full, column_full = tags, tags, tags, tags
    if cfg.NUM_COLUMNS > 0:
        tag_full = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
        column_full = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
        column0 = gl.allocate_shared_memory(cfg.COLUMN0, [S, cfg.TILE_N], SCALARS)
    if cfg.NUM_COLUMNS > 1:
        column1 = gl.allocate_shared_memory(cfg.COLUMN1, [S, cfg.TILE_N], SCALARS)
    q_full = gl.allocate_shared_memory(gl.int64, [Q, 1], BARRIERS)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q, 1], BARRIERS)
    k_full = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
    k_empty, v_empty = k_full, v_full
    if not cfg.NAMED:
        k_empty = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
        v_empty = gl.allocate_shared_memory(gl.int64, [S, 1], BARRIERS)
    v = gl.allocate_shared_memory(cfg.OPERAND, [S * P, cfg.TILE_N, cfg.DV], TILES)
    values_at = tags
    if cfg.WIDE:
        clear_beginnings()
        ALL: gl.constexpr = gl.BlockedLayout([1], [32], [cfg.WARPS], [0])
        values_at = gl.allocate_shared_memory(gl.int32, [1], SCALARS)
        address = address_of(v.index(0), cfg.TILE_N, cfg.DV)
        values_at.store(gl.full([1], address, gl.int32, ALL))
    mem = Shared(
        q,
        gl.allocate_shared_memory(cfg.OPERAND, [cfg.KEY_PANELS, cfg.TILE_N, cfg.D], TILES),
        v,
        out,
        gl.allocate_shared_memory(gl.int32, [2, 4], SCALARS),
        tags,
        values_at,
        column0,
        column1,
        tag_full,
        column_full,
        q_full,
        q_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS),
    )
    for i in gl.static_range(Q):
        mbarrier.init(mem.q_full.index(i), count=1)
        mbarrier.init(mem.q_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(mem.job_full.index(i), count=1)
        mbarrier.init(mem.job_empty.index(i), count=READERS)
    for i in gl.static_range(S):
        mbarrier.init(mem.k_full.index(i), count=1)
        if not cfg.NAMED:
            mbarrier.init(mem.k_empty.index(i), count=READERS)
            mbarrier.init(mem.v_empty.index(i), count=READERS)
        if cfg.NUM_COLUMNS > 0:
            mbarrier.init(mem.tag_full.index(i), count=1)
            mbarrier.init(mem.column_full.index(i), count=1)
        mbarrier.init(mem.v_full.index(i), count=1)
    fence_async_shared()
    return mem


@gluon.jit
def query_slot(n, consumer, cfg: gl.constexpr):
    """Where a consumer's queries of the n-th tile lie."""
    return (n & (cfg.Q_STAGES - 1)) * cfg.CONSUMERS + consumer


@gluon.jit
def query_phase(n, cfg: gl.constexpr):
    return (n >> (cfg.Q_STAGES - 1)) & 1


@gluon.jit
def give_job(mem, n, tile, unit, steps):
    """The producer says what the n-th tile is."""
    slot = n & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, LAYOUT)
    mbarrier.wait(mem.job_empty.index(slot), ((n >> 1) & 1) ^ 1)
    mem.jobs.index(slot).store(gl.where(i == 0, tile, gl.where(i == 1, unit, steps)))
    mbarrier.arrive(mem.job_full.index(slot), count=1)


@gluon.jit
def take_job(mem, n):
    """(tile, unit, steps) of the n-th tile."""
    slot = n & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    mbarrier.wait(mem.job_full.index(slot), (n >> 1) & 1)
    i = gl.arange(0, 4, LAYOUT)
    job = mem.jobs.index(slot).load(LAYOUT)
    tile = gl.sum(gl.where(i == 0, job, 0), 0)
    unit = gl.sum(gl.where(i == 1, job, 0), 0)
    steps = gl.sum(gl.where(i == 2, job, 0), 0)
    mbarrier.arrive(mem.job_empty.index(slot))
    return tile, unit, steps


@gluon.jit
def key_tile(tag, cfg: gl.constexpr):
    if cfg.APART:
        return tag >> FLAG_BITS
    else:
        return tag >> 1


@gluon.jit
def is_full(tag, consumer, cfg: gl.constexpr):
    """Whether a consumer keeps all scores of a step."""
    if cfg.APART:
        return ((tag >> (2 * consumer)) & 3) == 2
    else:
        return (tag & 1) == 0


@gluon.jit
def all_full(tag, cfg: gl.constexpr):
    """Whether every consumer keeps all scores of a step."""
    if cfg.APART:
        return (tag & ((1 << FLAG_BITS) - 1)) == (ALL_FULL if cfg.CONSUMERS == 3 else 10)
    else:
        return (tag & 1) == 0
