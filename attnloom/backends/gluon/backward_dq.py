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
from attnloom.backends.gluon.backward_products import (
    dk_done,
    keys_done,
    slices,
    start_scores,
)
from attnloom.backends.gluon.backward_shared import (
    LINES,
    all_steps,
    keys_slot,
    placed,
)
from attnloom.backends.gluon.backward_slots import (
    done_with_do,
    done_with_ds,
    done_with_q,
    wait_for_ds,
    wait_for_keys,
    wait_for_queries,
)
from attnloom.backends.gluon.backward_sweep import leave_dq, sums_so_far
from attnloom.backends.gluon.rings import get, slot_of

PANEL = gl.constexpr(64)  # columns
DQ_ROWS = gl.constexpr(64)  # of a product of dq, and of a tile of its memory


@gluon.constexpr_function
def dq_width(cfg):
    """Columns of dq that are one group's; NATIVE: see finish_step."""
    return cfg.D if cfg.DQ_APART or cfg.TILE_M > DQ_ROWS else cfg.D // 2


@gluon.jit
def start_dq(mem, n, kv, sums, which, cfg: gl.constexpr):
    """dscore . k of a step over both halves of the keys, which lie at kv and kv + 1: two products.
    sums: what SWEEPS adds them to. DQ_APART: all columns, otherwise the which-th half of them or,
    of steps of more than DQ_ROWS queries, of the rows."""
    if cfg.DQ_APART:
        return _start_dq_part(mem, n, kv, sums, 0, cfg)
    else:
        # where a part begins is a constant; the branch is gone once `which` is one
        if which == 0:
            dq = _start_dq_part(mem, n, kv, sums, 0, cfg)
        else:
            dq = _start_dq_part(mem, n, kv, sums, 1, cfg)
        return dq


@gluon.jit
def _start_dq_part(mem, n, kv, sums, WHICH: gl.constexpr, cfg: gl.constexpr):
    WIDTH: gl.constexpr = dq_width(cfg)
    k0, k1 = mem.k.index(kv), mem.k.index(kv + 1)
    if WIDTH < cfg.D:
        k0 = k0.slice(WHICH * WIDTH, WIDTH, dim=1)
        k1 = k1.slice(WHICH * WIDTH, WIDTH, dim=1)
    return dq_product(mem, n, k0, k1, sums, WHICH * DQ_ROWS, WIDTH, cfg)


@gluon.jit
def dq_product(mem, n, k0, k1, sums, ROW: gl.constexpr, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """dscore . k of a step over both halves of the keys, WIDTH columns of them: two products. ROW:
    the first, of a step of more than DQ_ROWS."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    slot = n & 1
    ds0, ds1 = mem.ds.index(slot * 2), mem.ds.index(slot * 2 + 1)
    if cfg.TILE_M > DQ_ROWS:
        ds0, ds1 = ds0.slice(ROW, DQ_ROWS, dim=1), ds1.slice(ROW, DQ_ROWS, dim=1)
    if cfg.SWEEPS:
        dq = warpgroup_mma(ds0.permute((1, 0)), k0, sums, is_async=True)
    else:
        acc = gl.zeros([DQ_ROWS, WIDTH], gl.float32, L)
        dq = warpgroup_mma(ds0.permute((1, 0)), k0, acc, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def dq_places(first, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """Where the accumulators of WIDTH columns of dq from `first` on go, but for the line: every
    four registers of a lane, 2 x 2 elements, share one address of 16 bytes. Layout:
    backward_around.py."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    r = gl.arange(0, DQ_ROWS, gl.SliceLayout(1, L))[:, None]
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
        return sums_so_far(dq_to, places, line, dq_width(cfg), cfg)
    else:
        return 0


@gluon.jit
def done_dq(dq_to, places, line, dq, which, cfg: gl.constexpr):
    """dq of a step to memory."""
    if cfg.SWEEPS:
        leave_dq(dq_to, places, line, dq, which * (cfg.D // 2), cfg)
    elif cfg.TILE_M > DQ_ROWS:
        add_dq(dq_to[0], places, line + which * DQ_ROWS, dq, cfg)
    else:
        add_dq(dq_to[0], places, line, dq, cfg)


@gluon.jit
def add_late_dq(mem, n, live, line, dq_to, places, kv, which, cfg: gl.constexpr):
    """dq of step n, if there is one (live), from start to end."""
    if cfg.NATIVE:
        if which == 0:
            _add_late_dq(mem, n, live, line, dq_to, places, kv, which, 0, PANEL, cfg)
        else:
            REST: gl.constexpr = cfg.COLUMNS - PANEL
            _add_late_dq(mem, n, live, line, dq_to, places, kv, which, PANEL, REST, cfg)
    else:
        _add_late_dq(mem, n, live, line, dq_to, places, kv, which, 0, 0, cfg)


@gluon.jit
def _add_late_dq(
    mem, n, live, line, dq_to, places, kv, which, FIRST: gl.constexpr, WIDTH: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    sums = sums_before(dq_to, places, line, cfg)
    wait_for_ds(mem, n, live, which, cfg)
    dq = warpgroup_mma_wait(0, [_start_own_dq(mem, n, kv, sums, which, FIRST, WIDTH, cfg)])
    done_with_ds(mem, n, live, which, cfg)
    if live:
        done_dq(dq_to, _own_places(places, FIRST, WIDTH, cfg), line, dq, which, cfg)


@gluon.jit
def finish_step(
    mem, n, sums, left, line_before, base, more, dq_to, places, kv, which, cfg: gl.constexpr
):
    """What comes behind the products of dk and dv of step n, where consumers have dq: that of the
    step before, whose addition to memory runs under the next scores, of a step if there is one
    (more). sums, left: of dk and dv, and what they take from registers. (The next scores, in
    flight, dk, dv, the step's line). NATIVE: a consumer has the first PANEL columns of dq or the
    others, as keys are swizzled that far."""
    if cfg.NATIVE:
        if which == 0:
            s, dk, dv, line = _finish_step(
                mem, n, sums, left, line_before, base, more, dq_to, places, kv, which, 0, PANEL, cfg
            )
        else:
            REST: gl.constexpr = cfg.COLUMNS - PANEL
            s, dk, dv, line = _finish_step(
                mem, n, sums, left, line_before, base, more, dq_to, places, kv, which, PANEL, REST,
                cfg,
            )  # fmt: skip
        return s, dk, dv, line
    else:
        return _finish_step(
            mem, n, sums, left, line_before, base, more, dq_to, places, kv, which, 0, 0, cfg
        )


@gluon.jit
def _finish_step(
    mem, n, sums, left, line_before, base, more, dq_to, places, kv, which, FIRST: gl.constexpr,
    WIDTH: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    SCORES: gl.constexpr = len(slices(cfg.COLUMNS))  # products of scores
    dk, dv = sums
    ds_left, p_left = left
    slot, before = slot_of(n, cfg), n - 1
    line = get(mem.lines.index(n & (LINES - 1)))
    sums_of_dq = sums_before(dq_to, places, line_before, cfg)
    # dv out of the way first: fewer operands in flight
    dv, p_left = keys_done(1, dv, p_left, cfg)
    done_with_do(mem, slot, cfg)
    wait_for_queries(mem, n + 1, more, cfg)
    wait_for_ds(mem, before, line_before >= 0, which, cfg)
    dq = _start_own_dq(mem, before, kv, sums_of_dq, which, FIRST, WIDTH, cfg)
    s = start_scores(mem, n + 1, base, kv + which, L, cfg)
    dk, ds_left = dk_done(SCORES + 2, dk, ds_left, cfg)
    done_with_q(mem, slot, cfg)
    dq = warpgroup_mma_wait(SCORES, [dq])
    done_with_ds(mem, before, line_before >= 0, which, cfg)
    if line_before >= 0:
        done_dq(dq_to, _own_places(places, FIRST, WIDTH, cfg), line_before, dq, which, cfg)
    return s, dk, dv, line


@gluon.jit
def _start_own_dq(
    mem, n, kv, sums, which, FIRST: gl.constexpr, WIDTH: gl.constexpr, cfg: gl.constexpr
):
    """start_dq, NATIVE: of these columns."""
    if cfg.NATIVE:
        k0 = mem.k.index(kv).slice(FIRST, WIDTH, dim=1)
        k1 = mem.k.index(kv + 1).slice(FIRST, WIDTH, dim=1)
        return dq_product(mem, n, k0, k1, sums, 0, WIDTH, cfg)
    else:
        return start_dq(mem, n, kv, sums, which, cfg)


@gluon.jit
def _own_places(places, FIRST: gl.constexpr, WIDTH: gl.constexpr, cfg: gl.constexpr):
    if cfg.NATIVE:
        return dq_places(FIRST, WIDTH, cfg)
    else:
        return places


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
