"""What the warps of a program of backward_roles.py share. Glossary: backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from attnloom.backends.gluon import addresses
from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_shared import (
    DO_LEFT,
    DO_THERE,
    DS_LEFT,
    DS_THERE,
    JOBS_LEFT,
    JOBS_THERE,
    KV_THERE,
    LINES,
    Q_LEFT,
    Q_THERE,
    Place,
)
from attnloom.backends.gluon.builtins import async_store
from attnloom.backends.gluon.products_96 import PIECE
from attnloom.backends.gluon.rings import box

KEYS = gl.constexpr(96)  # of a program
GROUPS = gl.constexpr(3)  # of PIECE keys
P_THERE = JOBS_THERE  # places of barriers (backward_shared.py)
P_LEFT = JOBS_LEFT

_Memory = gl.shared_memory_descriptor


@aggregate
class Shared:
    """As backward_shared.Shared, of two slots. k: [6 * 3, PIECE, PIECE], 32 columns of 96 keys
    after each other; v: [VALUE_PANELS * 3, PIECE, 64], 64 columns of them; p, exact: [3, 64,
    PIECE], halves and float16; ds: [2 * 3, 64, PIECE]. _at: addresses."""

    k: _Memory
    v: _Memory
    q: _Memory
    dout: _Memory
    p: _Memory
    exact: _Memory
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
    block: gl.tensor
    k_at: gl.tensor
    v_at: gl.tensor
    q_at: gl.tensor
    do_at: gl.tensor
    p_at: gl.tensor
    ds_at: gl.tensor
    exact_at: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, dout, p, exact, ds, lse, delta, tags, lines, kv_full, q_full, q_empty,
        do_full, do_empty, block, k_at, v_at, q_at, do_at, p_at, ds_at, exact_at,
    ):  # fmt: skip
        self.k, self.v, self.q, self.dout = k, v, q, dout
        self.p, self.exact, self.ds = p, exact, ds
        self.lse, self.delta, self.tags, self.lines = lse, delta, tags, lines
        self.kv_full, self.q_full, self.q_empty = kv_full, q_full, q_empty
        self.do_full, self.do_empty, self.block = do_full, do_empty, block
        self.k_at, self.v_at, self.q_at, self.do_at = k_at, v_at, q_at, do_at
        self.p_at, self.ds_at, self.exact_at = p_at, ds_at, exact_at


@gluon.jit
def allocate(cfg: gl.constexpr):
    M: gl.constexpr = cfg.TILE_M
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    SCALARS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    block = addresses.new_block()
    k = gl.allocate_shared_memory(cfg.OPERAND, [2 * P * GROUPS, PIECE, PIECE], NARROW)
    v = gl.allocate_shared_memory(cfg.OPERAND, [VP * GROUPS, PIECE, cfg.DV], WIDE)
    q = gl.allocate_shared_memory(cfg.OPERAND, [2 * P, M, cfg.D], WIDE)
    dout = gl.allocate_shared_memory(cfg.OPERAND, [2 * VP, M, cfg.DV], WIDE)
    p = gl.allocate_shared_memory(cfg.OPERAND, [GROUPS, M, PIECE], NARROW)
    ds = gl.allocate_shared_memory(cfg.OPERAND, [2 * GROUPS, M, PIECE], NARROW)
    EXACT: gl.constexpr = gl.float16
    exact = gl.allocate_shared_memory(EXACT, [GROUPS, M, PIECE], NARROW)
    tiles = (
        k.index(0), v.index(0), q.index(0), dout.index(0), p.index(0), ds.index(0), exact.index(0)
    )  # fmt: skip
    at = addresses.find_all(block, tiles)
    mem = Shared(
        k, v, q, dout, p, exact, ds,
        gl.allocate_shared_memory(gl.float32, [2, M], ROWS),
        gl.allocate_shared_memory(gl.float32, [2, M], ROWS),
        gl.allocate_shared_memory(gl.int32, [2, 1], SCALARS),
        gl.allocate_shared_memory(gl.int32, [LINES, 1], SCALARS),
        addresses.barriers(block, KV_THERE, 1, True),
        addresses.barriers(block, Q_THERE, 2, True),
        addresses.barriers(block, Q_LEFT, 2, True),
        addresses.barriers(block, DO_THERE, 2, True),
        addresses.barriers(block, DO_LEFT, 2, True),
        at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7],
    )  # fmt: skip
    ds_full = addresses.barriers(block, DS_THERE, 2, True)
    ds_empty = addresses.barriers(block, DS_LEFT, 2, True)
    mbarrier.init(mem.kv_full.index(0), count=1)
    mbarrier.init(addresses.barriers(block, P_THERE, 1, True).index(0), count=4)
    mbarrier.init(addresses.barriers(block, P_LEFT, 1, True).index(0), count=4)
    for i in gl.static_range(2):
        mbarrier.init(mem.q_full.index(i), count=1)
        mbarrier.init(mem.do_full.index(i), count=1)
        # warps of both consumers
        mbarrier.init(mem.q_empty.index(i), count=8)
        mbarrier.init(mem.do_empty.index(i), count=8)
        mbarrier.init(ds_full.index(i), count=4)
        mbarrier.init(ds_empty.index(i), count=4)
    fence_async_shared()
    return mem


@gluon.jit
def placed(plan, found):
    """The Place of a tile that `find_tile` found. lists[0] of roles_kernel has two numbers a tile,
    its first entry and its last + 1, which `entries_of` finds at twice the tile's number."""
    tile, b_kv, h_kv = found
    return Place(
        b_kv, h_kv, tile * KEYS, 2 * tile, plan[5], plan[4], plan[6], plan[7], plan[8], plan[9],
        plan[10], plan[11], plan[12], plan[14], plan[15], plan[16],
    )  # fmt: skip


@gluon.jit
def leave(desc, tiles, acc, scale, at, PANELS: gl.constexpr, cfg: gl.constexpr):
    """dk^T or dv^T, scaled, to memory by way of tiles [PANELS * 3, PIECE, 64]."""
    # other warps may still be reading there
    bi.barrier()
    for i in gl.static_range(PANELS * GROUPS):
        tiles.index(i).permute((1, 0)).store((acc[i] * scale).to(cfg.OPERAND))
    fence_async_shared()
    bi.barrier()
    for i in gl.static_range(PANELS * GROUPS):
        row = at.start + (i % GROUPS) * PIECE
        place = [at.b_kv, at.h_kv, row, (i // GROUPS) * 64]
        async_store(desc, place, box(tiles.index(i), PIECE, 64, cfg))
    tma.store_wait(0)
