"""dq of the backward: formed a step late from dscore in shared memory, and added to float32 memory
in the order of registers. Glossary: backward_shared.py and backward_sm90.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_jobs import done_with_job, job_of, wait_for_job
from attnloom.backends.gluon.backward_shared import (
    LINES,
    all_steps,
    keys_slot,
    placed,
)
from attnloom.backends.gluon.backward_slots import done_with_ds, wait_for_ds, wait_for_keys
from attnloom.backends.gluon.backward_sweep import leave_dq, sums_so_far
from attnloom.backends.gluon.rings import get


@gluon.jit
def start_dq(mem, n, kv, sums, which, cfg: gl.constexpr):
    """dscore . k of a step over both halves of the keys, which lie at kv and kv + 1: two products.
    sums: what SWEEPS adds them to. DQ_APART: all columns, otherwise the which-th half of them."""
    if cfg.DQ_APART:
        return _start_dq_columns(mem, n, kv, sums, 0, cfg)
    else:
        # where columns begin is a constant; the branch is gone once `which` is one
        if which == 0:
            dq = _start_dq_columns(mem, n, kv, sums, 0, cfg)
        else:
            dq = _start_dq_columns(mem, n, kv, sums, 1, cfg)
        return dq


@gluon.jit
def _start_dq_columns(mem, n, kv, sums, HALF_OF_THEM: gl.constexpr, cfg: gl.constexpr):
    WIDTH: gl.constexpr = cfg.D if cfg.DQ_APART else cfg.D // 2
    k0, k1 = mem.k.index(kv), mem.k.index(kv + 1)
    if not cfg.DQ_APART:
        k0 = k0.slice(HALF_OF_THEM * WIDTH, WIDTH, dim=1)
        k1 = k1.slice(HALF_OF_THEM * WIDTH, WIDTH, dim=1)
    return dq_product(mem, n, k0, k1, sums, WIDTH, cfg)


@gluon.jit
def dq_product(mem, n, k0, k1, sums, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """dscore . k of a step over both halves of the keys, WIDTH columns of them: two products."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    slot = n & 1
    ds0, ds1 = mem.ds.index(slot * 2), mem.ds.index(slot * 2 + 1)
    if cfg.SWEEPS:
        dq = warpgroup_mma(ds0.permute((1, 0)), k0, sums, is_async=True)
    else:
        acc = gl.zeros([cfg.TILE_M, WIDTH], gl.float32, L)
        dq = warpgroup_mma(ds0.permute((1, 0)), k0, acc, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def dq_places(first, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """Where the accumulators of WIDTH columns of dq from `first` on go, but for the line: every
    four registers of a lane, 2 x 2 elements, share one address of 16 bytes. Layout:
    backward_around.py."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    r = gl.arange(0, cfg.TILE_M, gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :] + first
    lane = (r % 8) * 4 + (c % 8) // 2
    return (((c // 8) * 4 + r // 16) * 128 + lane * 4).to(gl.int64) * 4


@gluon.jit
def add_dq(dq_ptr, places, line, dq, cfg: gl.constexpr):
    """Add columns of a step's dq to memory, 16 bytes a lane."""
    start = (dq_ptr + line.to(gl.int64) * (cfg.PANELS * cfg.D)).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$8], {$4, $5, $6, $7};"
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,f,f,f,f,l,l,l,l",
        [dq, start + places],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def sums_before(dq_to, places, line, cfg: gl.constexpr):
    """What a step's dq is added to in registers; SWEEPS. Asked for before it is needed."""
    if cfg.SWEEPS:
        return sums_so_far(dq_to, places, line, cfg.D if cfg.DQ_APART else cfg.D // 2, cfg)
    else:
        return 0


@gluon.jit
def done_dq(dq_to, places, line, dq, which, cfg: gl.constexpr):
    """dq of a step to memory."""
    if cfg.SWEEPS:
        leave_dq(dq_to, places, line, dq, which * (cfg.D // 2), cfg)
    else:
        add_dq(dq_to[0], places, line, dq, cfg)


@gluon.jit
def add_late_dq(mem, n, live, line, dq_to, places, kv, which, cfg: gl.constexpr):
    """dq of step n, if there is one (live), from start to end."""
    sums = sums_before(dq_to, places, line, cfg)
    wait_for_ds(mem, n, live, which, cfg)
    dq = warpgroup_mma_wait(0, [start_dq(mem, n, kv, sums, which, cfg)])
    done_with_ds(mem, n, live, which, cfg)
    if live:
        done_dq(dq_to, places, line, dq, which, cfg)


@gluon.jit
def _queries_of_tile(mem, dq_to, places, total, num, n, cfg: gl.constexpr):
    """dq of the steps of a program's num-th tile, the first of which is number n; the number after
    the last."""
    slot = keys_slot(num, cfg)
    # without steps nobody waits for this partition, and keys of later tiles may lie there already
    wait_for_keys(mem, num, slot, total > 0, cfg)
    for _ in range(0, total):
        wait_for_ds(mem, n, True, 0, cfg)
        line = get(mem.lines.index(n & (LINES - 1)))
        sums = sums_before(dq_to, places, line, cfg)
        dq = warpgroup_mma_wait(0, [start_dq(mem, n, slot * 2, sums, 0, cfg)])
        done_with_ds(mem, n, True, 0, cfg)
        done_dq(dq_to, places, line, dq, 0, cfg)
        n += 1
    return n


@gluon.jit
def own_queries(mem, plan, mine, dq_to, cfg: gl.constexpr):
    """The partition of dq, if it has one."""
    places = dq_places(0, cfg.D, cfg)
    if cfg.PERSISTENT:
        n = 0
        num = 0
        wait_for_job(mem, 0)
        tile, _, _, total = job_of(mem, 0)
        while tile >= 0:
            done_with_job(mem, num)
            n = _queries_of_tile(mem, dq_to, places, total, num, n, cfg)
            num += 1
            wait_for_job(mem, num)
            tile, _, _, total = job_of(mem, num)
    else:
        total = all_steps(placed(plan, mine, cfg), cfg)
        _queries_of_tile(mem, dq_to, places, total, 0, bi.scalar(0, gl.int32), cfg)
