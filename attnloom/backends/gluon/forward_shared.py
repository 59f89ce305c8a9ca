"""What the warps of a forward program share, and how they tell each other which tile comes next.

Glossary, beyond backends/triton/forward.py
    consumer     WARPS warps that own ROWS queries of a tile, 16 each
    step         TILE_N keys and values against the tile's queries
    ring, slot, phase    see rings.py
    tag          of a step: key tile * 2 + whether the mask is to be applied; APART: as an entry of
                 merged_lists.py, with the key tile in place of the block; STRIPS: without the tile
    job          of a tile: its number (-1: no more), b * Hq + h, its number of steps, the ends that
                 consumers pass over (forward_passed.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import addresses, configs_forward, merged_lists
from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_boxes import BOXES, PLACES
from attnloom.backends.gluon.rings import (
    COLUMNS_THERE,
    JOBS_LEFT,
    JOBS_THERE,
    KEYS_LEFT,
    KEYS_THERE,
    QUERIES_LEFT,
    QUERIES_THERE,
    TAGS_THERE,
    VALUES_LEFT,
    VALUES_THERE,
)

PANEL = gl.constexpr(configs_forward.PANEL)
FLAG_BITS = gl.constexpr(merged_lists.FLAG_BITS)
ALL_FULL = gl.constexpr(0b101010)  # flags of a step that three consumers keep all of, APART

_Memory = gl.shared_memory_descriptor


@aggregate
class Shared:
    """Tiles and barriers in shared memory.

    q: [Q_STAGES * CONSUMERS, ROWS, D]; k: [STAGES, TILE_N, D]; v: [STAGES, TILE_N, DV];
    out: [CONSUMERS, ROWS, DV], where results leave from; each PANELS times, those of a tile side by
    side, but for k if it is short (rings.py), and out[2 * CONSUMERS] if OUT_RING. STRIPS: k and v
    are of boxes of BOX rows (forward_boxes.py), whose rows are in places: [PLACES, 4].
    jobs: [2, 4]; tags: [STAGES, 1]; columns: up to two of [STAGES, TILE_N], see forward_columns.py.
    values_at, block: addresses of v, if WIDE, and of all barriers, if BY_WARP; keys_at, queries_at:
    of k and q, if STRIPS.
    """

    q: _Memory
    k: _Memory
    v: _Memory
    out: _Memory
    jobs: _Memory
    tags: _Memory
    places: _Memory
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
    values_at: gl.tensor
    keys_at: gl.tensor
    queries_at: gl.tensor
    block: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, out, jobs, tags, places, column0, column1, tag_full, column_full, q_full,
        q_empty, k_full, k_empty, v_full, v_empty, job_full, job_empty, values_at, keys_at,
        queries_at, block,
    ):  # fmt: skip
        self.q, self.k, self.v, self.out = q, k, v, out
        self.jobs, self.tags, self.places = jobs, tags, places
        self.column0, self.column1 = column0, column1
        self.tag_full, self.column_full = tag_full, column_full
        self.q_full, self.q_empty = q_full, q_empty
        self.k_full, self.k_empty = k_full, k_empty
        self.v_full, self.v_empty = v_full, v_empty
        self.job_full, self.job_empty = job_full, job_empty
        self.values_at, self.keys_at, self.queries_at = values_at, keys_at, queries_at
        self.block = block


@gluon.jit
def allocate(cfg: gl.constexpr):
    S: gl.constexpr = cfg.STAGES
    C: gl.constexpr = cfg.CONSUMERS
    Q: gl.constexpr = cfg.Q_STAGES * C
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    READERS: gl.constexpr = C + (1 if cfg.NUM_COLUMNS > 0 else 0)
    ARRIVING: gl.constexpr = cfg.WARPS if cfg.BY_WARP else 1  # of a consumer
    LEAVERS: gl.constexpr = READERS + C * (ARRIVING - 1)
    BLOCK: gl.constexpr = cfg.BY_WARP
    P: gl.constexpr = cfg.PANELS
    q = gl.allocate_shared_memory(cfg.OPERAND, [Q * P, cfg.ROWS, cfg.D], TILES)
    out = q
    if not cfg.OUT_IN_Q:
        SPACES: gl.constexpr = 2 if cfg.OUT_RING else P  # of a consumer
        out = gl.allocate_shared_memory(cfg.OPERAND, [C * SPACES, cfg.ROWS, cfg.DV], TILES)
    tags = gl.allocate_shared_memory(gl.int32, [S, 1], SCALARS)
    if cfg.STRIPS:
        NUM_BOXES: gl.constexpr = S * P * BOXES
        v = gl.allocate_shared_memory(cfg.OPERAND, [NUM_BOXES, cfg.BOX, cfg.DV], TILES)
    else:
        v = gl.allocate_shared_memory(cfg.OPERAND, [S * P, cfg.TILE_N, cfg.DV], TILES)
    block = tags
    if BLOCK:
        block = addresses.new_block()
    k, places = v, tags
    keys_at, queries_at = bi.scalar(0, gl.int32), bi.scalar(0, gl.int32)
    if cfg.STRIPS:
        k = gl.allocate_shared_memory(cfg.OPERAND, [NUM_BOXES, cfg.BOX, cfg.D], TILES)
        found = addresses.find_all(block, (v.index(0), k.index(0), q.index(0)))
        block_at, values_at, keys_at, queries_at = found
        places = gl.allocate_shared_memory(gl.int32, [PLACES, 4], SCALARS)
    else:
        block_at, values_at = addresses.find(block, v.index(0), BLOCK, cfg.WIDE)
    # Memory of barriers that nobody used later would be given to other things, while they are
    # barriers still: an interrupted program then reads other values than it wrote there (H200).
    column0, column1, tag_full, column_full = tags, tags, tags, tags
    if cfg.NUM_COLUMNS > 0:
        tag_full = addresses.barriers(block, TAGS_THERE, S, BLOCK)
        column_full = addresses.barriers(block, COLUMNS_THERE, S, BLOCK)
        column0 = gl.allocate_shared_memory(cfg.COLUMN0, [S, cfg.TILE_N], SCALARS)
    if cfg.NUM_COLUMNS > 1:
        column1 = gl.allocate_shared_memory(cfg.COLUMN1, [S, cfg.TILE_N], SCALARS)
    k_full = addresses.barriers(block, KEYS_THERE, S, BLOCK)
    v_full = addresses.barriers(block, VALUES_THERE, S, BLOCK)
    k_empty, v_empty = k_full, v_full
    if not cfg.NAMED:
        k_empty = addresses.barriers(block, KEYS_LEFT, S, BLOCK)
        v_empty = addresses.barriers(block, VALUES_LEFT, S, BLOCK)
    if not cfg.STRIPS:
        k = gl.allocate_shared_memory(cfg.OPERAND, [cfg.KEY_PANELS, cfg.TILE_N, cfg.D], TILES)
    mem = Shared(
        q,
        k,
        v,
        out,
        gl.allocate_shared_memory(gl.int32, [2, 4], SCALARS),
        tags,
        places,
        column0,
        column1,
        tag_full,
        column_full,
        addresses.barriers(block, QUERIES_THERE, Q, BLOCK),
        addresses.barriers(block, QUERIES_LEFT, Q, BLOCK),
        k_full,
        k_empty,
        v_full,
        v_empty,
        addresses.barriers(block, JOBS_THERE, 2, BLOCK),
        addresses.barriers(block, JOBS_LEFT, 2, BLOCK),
        values_at,
        keys_at,
        queries_at,
        block_at,
    )
    for i in gl.static_range(Q):
        mbarrier.init(mem.q_full.index(i), count=1)
        mbarrier.init(mem.q_empty.index(i), count=ARRIVING)
    for i in gl.static_range(2):
        mbarrier.init(mem.job_full.index(i), count=1)
        mbarrier.init(mem.job_empty.index(i), count=READERS)
    for i in gl.static_range(S):
        mbarrier.init(mem.k_full.index(i), count=1)
        if not cfg.NAMED:
            mbarrier.init(mem.k_empty.index(i), count=LEAVERS)
            mbarrier.init(mem.v_empty.index(i), count=LEAVERS)
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
def give_job(mem, n, tile, unit, steps, dead):
    """The producer says what the n-th tile is."""
    slot = n & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, LAYOUT)
    mbarrier.wait(mem.job_empty.index(slot), ((n >> 1) & 1) ^ 1)
    counts = gl.where(i == 2, steps, dead)
    mem.jobs.index(slot).store(gl.where(i == 0, tile, gl.where(i == 1, unit, counts)))
    mbarrier.arrive(mem.job_full.index(slot), count=1)


@gluon.jit
def take_job(mem, n, cfg: gl.constexpr):
    """(tile, unit, steps, dead ends) of the n-th tile."""
    slot = n & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    mbarrier.wait(mem.job_full.index(slot), (n >> 1) & 1)
    i = gl.arange(0, 4, LAYOUT)
    job = mem.jobs.index(slot).load(LAYOUT)
    tile = gl.sum(gl.where(i == 0, job, 0), 0)
    unit = gl.sum(gl.where(i == 1, job, 0), 0)
    steps = gl.sum(gl.where(i == 2, job, 0), 0)
    dead = 0
    if cfg.SKIPS_ENDS:
        dead = gl.sum(gl.where(i == 3, job, 0), 0)
    mbarrier.arrive(mem.job_empty.index(slot))
    return tile, unit, steps, dead


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
