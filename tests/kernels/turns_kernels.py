"""Small Gluon kernels that have one thing more than the last of what attention's have, and results
that are known: which of them survives that a GPU changes to another process in the middle?

A program forms the sum of `steps` tiles of [ROWS, COLUMNS] from memory, several times over, and
stores it to its place. Parts that a configuration may lack:

    APART     partitions of warps: two that add, each half of the rows, and one that loads;
              otherwise four warps do all of it
    LOADS     tiles come by TMA, announced by mbarriers, through a ring of STAGES; otherwise each
              partition reads them itself, and with SIGNALS asks the loader all the same
    SIGNALS   partitions take turns by mbarriers
    STORES    results leave by TMA; otherwise by stores
    DRAWS     one program a processor draws the numbers of tiles
    PRODUCTS  tiles are multiplied by a unit matrix on the tensor cores first
    UNUSED    barriers that nobody waits for, whose memory the compiler gives to others
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.rings import get, put
from attnloom.backends.triton.config import KernelConfig

ROWS = gl.constexpr(64)  # of a partition that adds
COLUMNS = gl.constexpr(64)
STAGES = gl.constexpr(4)


@dataclass(frozen=True, repr=False)
class Parts(KernelConfig):
    """What a kernel has; REPEATS: how often the same tiles are added again."""

    APART: bool = False
    SIGNALS: bool = False
    LOADS: bool = False
    STORES: bool = False
    DRAWS: bool = False
    PRODUCTS: bool = False
    UNUSED: bool = False
    REPEATS: int = 8

    __hash__ = KernelConfig.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.APART or not (self.SIGNALS or self.DRAWS)
        assert self.SIGNALS or not (self.LOADS and self.APART)


@aggregate
class Shared:
    """tiles: [STAGES * 2, ROWS, COLUMNS] from memory. unit: the unit matrix. out: [2, ROWS,
    COLUMNS] that leave. jobs: the number of the next tile, for each of those that add."""

    tiles: gl.shared_memory_descriptor
    unit: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    jobs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor
    heard: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, unit, out, jobs, full, empty, told, heard):
        self.tiles, self.unit, self.out, self.jobs = tiles, unit, out, jobs
        self.full, self.empty, self.told, self.heard = full, empty, told, heard


@gluon.jit
def _allocate(cfg: gl.constexpr):
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    ADDERS: gl.constexpr = 2 if cfg.APART else 1
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS, COLUMNS], TILES)
    unit = gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, COLUMNS], TILES)
    out = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], TILES)
    jobs = gl.allocate_shared_memory(gl.int32, [2, 1], SCALARS)
    # what a kernel does not use is no barrier
    full, empty, told, heard = jobs, jobs, jobs, jobs
    if cfg.SIGNALS or cfg.LOADS:
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    if cfg.SIGNALS:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    if cfg.DRAWS:
        told = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
        heard = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    if cfg.UNUSED:
        unused = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
        for i in gl.static_range(STAGES):
            mbarrier.init(unused.index(i), count=1)
    for i in gl.static_range(STAGES):
        if cfg.SIGNALS or cfg.LOADS:
            mbarrier.init(full.index(i), count=1)
        if cfg.SIGNALS:
            mbarrier.init(empty.index(i), count=ADDERS)
    if cfg.DRAWS:
        for i in gl.static_range(2):
            mbarrier.init(told.index(i), count=1)
            mbarrier.init(heard.index(i), count=ADDERS)
    mem = Shared(tiles, unit, out, jobs, full, empty, told, heard)
    if cfg.PRODUCTS:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        row = gl.arange(0, COLUMNS, gl.SliceLayout(1, L))[:, None]
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))[None, :]
        mem.unit.store((row == column).to(gl.bfloat16))
    fence_async_shared()
    return mem


@gluon.jit
def _announce(source, mem, tile, step, n, cfg: gl.constexpr):
    """Both halves of a step's tile to its slot, or word that they may be read."""
    slot = n % STAGES
    mbarrier.wait(mem.empty.index(slot), (n // STAGES & 1) ^ 1)
    if cfg.LOADS:
        mbarrier.expect(mem.full.index(slot), 2 * ROWS * COLUMNS * 2)
        for half in gl.static_range(2):
            row = (tile + step) * 2 * ROWS + half * ROWS
            place = mem.tiles.index(slot * 2 + half)
            bi.async_load(source, [row, 0], mem.full.index(slot), place)
    else:
        mbarrier.arrive(mem.full.index(slot), count=1)


@gluon.jit
def _add(source, pointer, mem, tile, step, n, half, acc, cfg: gl.constexpr):
    """One step of one half onto its sum."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    slot = n % STAGES
    if cfg.SIGNALS:
        mbarrier.wait(mem.full.index(slot), n // STAGES & 1)
    elif cfg.LOADS:
        # nobody else loads: asked for and waited for at once
        mbarrier.expect(mem.full.index(slot), ROWS * COLUMNS * 2)
        row = (tile + step) * 2 * ROWS + half * ROWS
        bi.async_load(source, [row, 0], mem.full.index(slot), mem.tiles.index(slot * 2 + half))
        mbarrier.wait(mem.full.index(slot), n // STAGES & 1)
    if cfg.LOADS and cfg.PRODUCTS:
        acc = warpgroup_mma(mem.tiles.index(slot * 2 + half), mem.unit, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    elif cfg.LOADS:
        acc += mem.tiles.index(slot * 2 + half).load(L).to(gl.float32)
    else:
        row = (tile + step) * 2 * ROWS + half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
        acc += gl.load(pointer + row[:, None] * COLUMNS + column[None, :]).to(gl.float32)
    if cfg.SIGNALS:
        mbarrier.arrive(mem.empty.index(slot))
    return acc


@gluon.jit
def _leave(target, out, mem, tile, half, acc, cfg: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row = tile * 2 * ROWS + half * ROWS
    if cfg.STORES:
        mem.out.index(half).store(acc.to(gl.bfloat16))
        fence_async_shared()
        bi.barrier()
        bi.async_store(target, [row, 0], mem.out.index(half))
        tma.store_wait(0)
    else:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
        gl.store(out + rows[:, None] * COLUMNS + column[None, :], acc.to(gl.bfloat16))


@gluon.jit
def _sum_of(source, pointer, target, out, mem, tile, steps, n, half, cfg: gl.constexpr):
    """A tile from its first step, number n, to memory; the number after the last."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, L)
    for _ in range(0, cfg.REPEATS):
        for step in range(0, steps):
            acc = _add(source, pointer, mem, tile, step, n, half, acc, cfg)
            n += 1
    _leave(target, out, mem, tile, half, acc / cfg.REPEATS, cfg)
    return n


@gluon.jit
def _adder(source, pointer, target, out, mem, steps, HALF: gl.constexpr, cfg: gl.constexpr):
    """The partition of one half."""
    half = bi.scalar(HALF, gl.int32)
    if cfg.DRAWS:
        n = 0
        num = 0
        mbarrier.wait(mem.told.index(0), 0)
        tile = get(mem.jobs.index(0))
        while tile >= 0:
            mbarrier.arrive(mem.heard.index(num & 1))
            n = _sum_of(source, pointer, target, out, mem, tile, steps, n, half, cfg)
            num += 1
            mbarrier.wait(mem.told.index(num & 1), num >> 1 & 1)
            tile = get(mem.jobs.index(num & 1))
    else:
        n = bi.scalar(0, gl.int32)
        _sum_of(source, pointer, target, out, mem, gl.program_id(0), steps, n, half, cfg)


@gluon.jit
def _load_tile(source, mem, tile, steps, n, cfg: gl.constexpr):
    if cfg.SIGNALS:
        for _ in range(0, cfg.REPEATS):
            for step in range(0, steps):
                _announce(source, mem, tile, step, n, cfg)
                n += 1
    return n


@gluon.jit
def _tell(mem, num, tile):
    mbarrier.wait(mem.heard.index(num & 1), (num >> 1 & 1) ^ 1)
    put(mem.jobs.index(num & 1), tile)
    mbarrier.arrive(mem.told.index(num & 1), count=1)


@gluon.jit
def _loader(source, mem, counter, steps, total, cfg: gl.constexpr):
    """The partition of a warp that loads; with DRAWS it says which tile comes."""
    if cfg.DRAWS:
        n = 0
        num = 0
        tile = gl.atomic_add(counter, 1, sem="relaxed")
        while tile < total:
            _tell(mem, num, tile)
            n = _load_tile(source, mem, tile, steps, n, cfg)
            num += 1
            tile = gl.atomic_add(counter, 1, sem="relaxed")
        _tell(mem, num, -1)
        if tile == total + gl.num_programs(0) - 1:
            gl.store(counter, 0)
    else:
        _load_tile(source, mem, gl.program_id(0), steps, bi.scalar(0, gl.int32), cfg)


@gluon.jit(do_not_specialize=["steps", "total"])
def turns_kernel(source, pointer, target, out, counter, steps, total, cfg: gl.constexpr):
    """source, target: descriptors of `pointer` and `out`, [n * 2 * ROWS, COLUMNS] in bfloat16.
    total: tiles. counter: one int32, 0 before and after."""
    mem = _allocate(cfg)
    if cfg.APART:
        bi.warp_specialize(
            [
                (_adder, (source, pointer, target, out, mem, steps, 0, cfg)),
                (_adder, (source, pointer, target, out, mem, steps, 1, cfg)),
                (_loader, (source, mem, counter, steps, total, cfg)),
            ],
            [4, 1],
            [168, 24],
        )
    else:
        n = bi.scalar(0, gl.int32)
        tile = gl.program_id(0)
        for half in gl.static_range(2):
            n = _sum_of(source, pointer, target, out, mem, tile, steps, n, half, cfg)
