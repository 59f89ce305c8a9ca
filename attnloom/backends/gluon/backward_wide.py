"""dq and dk on Hopper for heads of 129 to 192: backward_sm90.py's kernel without dv, in panels.

dk and dv of 192 columns are 192 registers a thread: they do not fit beside scores. This kernel has
dk and adds dq, in 4 products a step; dv comes from a portable key kernel that has it alone, in 2.
D and Dv lie in panels of 64 columns, as a tile has a power of two of them: as many products of a
step, each a group of its own to wait for, and as many accumulators of dk.

dq of both halves of the keys is formed a step late, 96 columns by each consumer: the first or the
last panel, and half of the middle one. It is added to float32 memory in the order of registers, as
backward_sm90.py does. Row statistics are those of the portable kernels, whose pitch is in whole
blocks, so that no step leaves it.

Glossary: backward_shared.py; k, v, q and dout have PANELS or VALUE_PANELS entries for each of its.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_math import (
    contexts,
    dscores,
    look_up,
    masked,
    modified,
    subtrahend,
    weighted,
)
from attnloom.backends.gluon.backward_shared import (
    HALF,
    LINES,
    all_steps,
    find_tile,
    placed,
    plan_of,
    steps_of,
    unit_of,
)
from attnloom.backends.gluon.backward_sm90 import give_ds, product
from attnloom.backends.gluon.backward_wide_load import allocate, load_steps
from attnloom.backends.gluon.builtins import async_store, barrier, exp2_fast
from attnloom.backends.gluon.rings import box, get, phase_of, slot_of
from attnloom.backends.triton.device_math import whole32

MIDDLE = gl.constexpr(32)  # columns of the middle panel that a consumer has of dq


@gluon.jit
def _start_scores(mem, n, base, which, L: gl.constexpr, cfg: gl.constexpr):
    """k . q^T of a step, less lse if FOLD: PANELS products in flight."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = mem.lse.index(slot).load(gl.SliceLayout(0, L)) * (-1.0 / base)
    k, q = which * cfg.PANELS, slot * cfg.PANELS
    s = product(mem.k.index(k), mem.q.index(q), init, L, cfg)
    for i in gl.static_range(1, cfg.PANELS):
        queries = mem.q.index(q + i).permute((1, 0))
        s = warpgroup_mma(mem.k.index(k + i), queries, s, is_async=True)
    return s


@gluon.jit
def _start_dp(mem, n, which, L: gl.constexpr, cfg: gl.constexpr):
    """v . dout^T of a step, less delta if FOLD: VALUE_PANELS products in flight."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = -mem.delta.index(slot).load(gl.SliceLayout(0, L))
    v, g = which * cfg.VALUE_PANELS, slot * cfg.VALUE_PANELS
    dp = product(mem.v.index(v), mem.dout.index(g), init, L, cfg)
    for i in gl.static_range(1, cfg.VALUE_PANELS):
        gradients = mem.dout.index(g + i).permute((1, 0))
        dp = warpgroup_mma(mem.v.index(v + i), gradients, dp, is_async=True)
    return dp


@gluon.jit
def _start_dq(mem, n, which, cfg: gl.constexpr):
    """dscore . k of a step over both halves of the keys, a consumer's columns: four products in
    flight, (its panel, its half of the middle one)."""
    # where columns begin is a constant; the branch is gone once `which` is one
    if which == 0:
        wide, narrow = _start_dq_columns(mem, n, 0, cfg)
    else:
        wide, narrow = _start_dq_columns(mem, n, 1, cfg)
    return wide, narrow


@gluon.jit
def _start_dq_columns(mem, n, WHICH: gl.constexpr, cfg: gl.constexpr):
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.D, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MIDDLE, 16])
    slot = n & 1
    ds0 = mem.ds.index(slot * 2).permute((1, 0))
    ds1 = mem.ds.index(slot * 2 + 1).permute((1, 0))
    k0, k1 = mem.k.index(2 * WHICH), mem.k.index(cfg.PANELS + 2 * WHICH)
    wide = gl.zeros([cfg.TILE_M, cfg.D], gl.float32, WIDE)
    wide = warpgroup_mma(ds0, k0, wide, use_acc=False, is_async=True)
    wide = warpgroup_mma(ds1, k1, wide, is_async=True)
    k0 = mem.k.index(1).slice(WHICH * MIDDLE, MIDDLE, dim=1)
    k1 = mem.k.index(cfg.PANELS + 1).slice(WHICH * MIDDLE, MIDDLE, dim=1)
    narrow = gl.zeros([cfg.TILE_M, MIDDLE], gl.float32, NARROW)
    narrow = warpgroup_mma(ds0, k0, narrow, use_acc=False, is_async=True)
    narrow = warpgroup_mma(ds1, k1, narrow, is_async=True)
    return wide, narrow


@gluon.jit
def _places(first, COLS: gl.constexpr, cfg: gl.constexpr):
    """Where accumulators of dq of COLS columns from `first` on go, but for the line; see
    backward_sm90.py."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    r = gl.arange(0, cfg.TILE_M, gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, COLS, gl.SliceLayout(0, L))[None, :]
    lane = (r % 8) * 4 + (c % 8) // 2
    start = (first // 8) * 4 * 128
    return ((((c // 8) * 4 + r // 16) * 128 + lane * 4) + start).to(gl.int64) * 4


@gluon.jit
def _add_dq(dq_ptr, places, line, dq, cfg: gl.constexpr):
    """Add a step's dq to memory, 16 bytes a lane."""
    start = (dq_ptr + line.to(gl.int64) * (cfg.PANELS * cfg.D)).to(gl.int64)
    for i in gl.static_range(2):
        gl.inline_asm_elementwise(
            "red.relaxed.gpu.global.add.v4.f32 [$8], {$4, $5, $6, $7};"
            "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
            "=r,=r,=r,=r,f,f,f,f,l,l,l,l",
            [dq[i], start + places[i]],
            dtype=gl.int32,
            is_pure=False,
            pack=4,
        )


@gluon.jit
def _add_late_dq(mem, n, line, dq_ptr, places, which, cfg: gl.constexpr):
    """dq of step n, if there is one, from start to end."""
    mbarrier.wait(mem.ds_full.index(n & 1), (n >> 1) & 1, pred=n >= 0)
    wide, narrow = _start_dq(mem, n, which, cfg)
    wide, narrow = warpgroup_mma_wait(0, [wide, narrow])
    mbarrier.arrive(mem.ds_empty.index(n & 1), pred=n >= 0)
    if n >= 0:
        _add_dq(dq_ptr, places, line, (wide, narrow), cfg)


@gluon.jit
def _add_keys(ds, mem, slot, dk, cfg: gl.constexpr):
    """dk + dscore . q of a step: PANELS products in flight."""
    left, middle, right = dk
    q = slot * cfg.PANELS
    left = warpgroup_mma(ds, mem.q.index(q), left, is_async=True)
    middle = warpgroup_mma(ds, mem.q.index(q + 1), middle, is_async=True)
    right = warpgroup_mma(ds, mem.q.index(q + 2), right, is_async=True)
    return left, middle, right


@gluon.jit
def _step(state, n, total, mem, context, dq_ptr, places, numbers, keys, which, cfg: gl.constexpr):
    """One step. state = (its raw scores, panels of dk, line of the step before), and of the next
    one on return."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.D, 16])
    factor, base, kv_len, first, q_offset, kv_offset = numbers
    s, dk, line_before = state
    slot, phase = slot_of(n, cfg), phase_of(n, cfg)
    queries = gl.arange(0, cfg.TILE_M, gl.SliceLayout(0, L))
    partial, query = False, 0
    if cfg.NEEDS_QUERIES:
        tag = get(mem.tags.index(slot))
        query = tag >> 1
        queries += query
        partial = (tag & 1) != 0
    corner = (query, first)
    pieces = look_up(context, corner, cfg)
    mbarrier.wait(mem.do_full.index(slot), phase)
    dp = _start_dp(mem, n, which, L, cfg)
    x, rest = modified(s, context, (0.0,), pieces, corner, queries, keys, factor, cfg)
    exponent = x * base
    if not cfg.FOLD:
        less = mem.lse.index(slot).load(gl.SliceLayout(0, L))
        less = subtrahend(less, context, queries, first, base, cfg)
        exponent = exponent - less[None, :]
    p = exp2_fast(exponent)
    if cfg.MAY_MASK:
        if partial:
            p = masked(p, context, mem, n, queries, keys, (q_offset, kv_offset), kv_len, cfg)
    weight = weighted(p, rest, cfg)
    dp = warpgroup_mma_wait(0, [dp])
    if not cfg.FOLD:
        dp = dp - mem.delta.index(slot).load(gl.SliceLayout(0, L))[None, :]
    mbarrier.arrive(mem.do_empty.index(slot))
    none = (0.0,)
    ds, _ = dscores(weight, dp, rest, none, context, none, pieces, corner, queries, keys, cfg)
    ds = ds.to(cfg.OPERAND)
    ds_left = gl.convert_layout(ds, gl.DotOperandLayout(0, DK, 2))
    give_ds(mem, n, ds, which, cfg)
    dk = _add_keys(ds_left, mem, slot, dk, cfg)
    fence_async_shared()
    barrier()
    mbarrier.arrive(mem.ds_full.index(n & 1))
    # dq of the step before, whose addition to memory runs under the next scores
    before, more = n - 1, n + 1 < total
    line = get(mem.lines.index(n & (LINES - 1)))
    mbarrier.wait(mem.ds_full.index(before & 1), (before >> 1) & 1, pred=n > 0)
    wide, narrow = _start_dq(mem, before, which, cfg)
    left, middle, right, ds_left = warpgroup_mma_wait(4, [dk[0], dk[1], dk[2], ds_left])
    mbarrier.arrive(mem.q_empty.index(slot))
    mbarrier.wait(mem.q_full.index(slot_of(n + 1, cfg)), phase_of(n + 1, cfg), pred=more)
    s_next = _start_scores(mem, n + 1, base, which, L, cfg)
    wide, narrow = warpgroup_mma_wait(cfg.PANELS, [wide, narrow])
    mbarrier.arrive(mem.ds_empty.index(before & 1), pred=n > 0)
    if n > 0:
        _add_dq(dq_ptr, places, line_before, (wide, narrow), cfg)
    s_next = warpgroup_mma_wait(0, [s_next])
    return s_next, (left, middle, right), line


@gluon.jit
def _leave(dk_desc, mem, dk, at, row, which, outgoing, cfg: gl.constexpr):
    """dk of a consumer to memory, by way of its keys' place."""
    for i in gl.static_range(cfg.PANELS):
        mem.k.index(which * cfg.PANELS + i).store((dk[i] * outgoing).to(cfg.OPERAND))
    fence_async_shared()
    barrier()
    for i in gl.static_range(cfg.PANELS):
        panel = box(mem.k.index(which * cfg.PANELS + i), HALF, cfg.D, cfg)
        async_store(dk_desc, [at.b_kv, at.h_kv, row, i * cfg.D], panel)
    tma.store_wait(0)


@gluon.jit
def _own_keys(
    mem, at, dq_ptr, dk_desc, score_args, mask_args, scales, kv_len, q_offset, kv_offset, which,
    cfg: gl.constexpr,
):  # fmt: skip
    """What a consumer does."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.D, 16])
    row = at.start + which * HALF
    keys = row + gl.arange(0, HALF, gl.SliceLayout(1, L))
    own = 2 * which * cfg.D
    middle = cfg.D + which * MIDDLE
    places = (_places(own, cfg.D, cfg), _places(middle, MIDDLE, cfg))
    zeros = gl.zeros([HALF, cfg.D], gl.float32, DK)
    dk = (zeros, zeros, zeros)
    factor, base, outgoing = scales
    numbers = (factor, base, kv_len, row, q_offset, kv_offset)
    total = all_steps(at, cfg)
    mbarrier.wait(mem.kv_full, 0)
    mbarrier.wait(mem.q_full.index(0), 0, pred=total > 0)
    s = warpgroup_mma_wait(0, [_start_scores(mem, 0, base, which, L, cfg)])
    n = 0
    line = -1
    if cfg.BY_HEAD:
        parts = at.units
    else:
        parts = 1
    for unit in range(0, parts):
        b, h = unit_of(at, unit)
        steps = total
        if cfg.BY_HEAD:
            steps = steps_of(at, unit, cfg)
        context = contexts(score_args, mask_args, b, h, keys, row, kv_offset, cfg)
        for _ in range(0, steps):
            state = (s, dk, line)
            s, dk, line = _step(
                state, n, total, mem, context, dq_ptr, places, numbers, keys, which, cfg
            )
            # `n = end` after the loop would not be carried to the next unit
            n += 1
    _add_late_dq(mem, total - 1, line, dq_ptr, places, which, cfg)
    # keys are read for dq of both halves
    last = total - 1
    mbarrier.wait(mem.ds_empty.index(last & 1), (last >> 1) & 1, pred=total > 0)
    _leave(dk_desc, mem, dk, at, row, which, outgoing, cfg)


@gluon.jit
def _consumer(
    mem, at, dq_ptr, dk_desc, score_args, mask_args, scales, kv_len, q_offset, kv_offset,
    NUMBER: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """The partition of a consumer; why its number is a value: forward_sm90.py."""
    number = bi.scalar(NUMBER, gl.int32)
    _own_keys(
        mem, at, dq_ptr, dk_desc, score_args, mask_args, scales, kv_len, q_offset, kv_offset,
        number, cfg,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["lists", "score_args", "mask_args", "scales", "shape"])
def wide_kernel(
    q_desc, do_desc, k_desc, v_desc, stats, dk_desc, dq_ptr, lists, score_args, mask_args, scales,
    shape, cfg: gl.constexpr,
):  # fmt: skip
    """As backward_kernel of backward_sm90.py, without captured gradients. dq_ptr: [B * Hq * PITCH,
    PANELS * D] float32, zeros before."""
    mem = allocate(cfg)
    plan = plan_of(lists, shape)
    at = placed(plan, find_tile(plan, gl.program_id(0), cfg), cfg)
    kv_len = whole32(shape, 12)
    q_offset, kv_offset = whole32(shape, 21), whole32(shape, 24)
    bi.warp_specialize(
        [
            (_consumer, (mem, at, dq_ptr, dk_desc, score_args, mask_args, scales, kv_len, q_offset,
                         kv_offset, 0, cfg)),
            (_consumer, (mem, at, dq_ptr, dk_desc, score_args, mask_args, scales, kv_len, q_offset,
                         kv_offset, 1, cfg)),
            (load_steps, (q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg)),
        ],
        [4, 1],
        [cfg.REGISTERS, cfg.LOAD_REGISTERS],
    )  # fmt: skip
