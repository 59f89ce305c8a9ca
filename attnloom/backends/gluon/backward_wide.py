"""dq and dk on Hopper for heads of 129 to 192 that backward_roles.py is not for, as it is not where
there is a score_mod: backward_sm90.py's kernel without dv, in panels.

dk and dv of 192 columns are 192 registers a thread: they do not fit beside scores. This kernel has
dk and adds dq, in 4 products a step; dv comes from a portable key kernel that has it alone, in 2.
D and Dv lie in panels of 64 columns, as a tile has a power of two of them: as many products of a
step, each a group of its own to wait for, and as many accumulators of dk.

dq of both halves of the keys is formed a step late, 96 columns by each consumer: the first or the
last panel, and half of the middle one. It is added to float32 memory in the order of registers, as
backward_sm90.py does. Row statistics are those of the portable kernels, whose pitch is in whole
blocks, so that no step leaves it.

Glossary: backward_shared.py.
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
from attnloom.backends.gluon.backward_dq import add_dq, dq_places, dq_product
from attnloom.backends.gluon.backward_load import load_tile
from attnloom.backends.gluon.backward_math import (
    contexts,
    dscores,
    less_delta,
    look_up,
    probabilities,
    queries_of,
    weighted,
)
from attnloom.backends.gluon.backward_products import give_ds, start_dp, start_scores
from attnloom.backends.gluon.backward_shared import (
    HALF,
    LINES,
    all_steps,
    allocate,
    find_tile,
    leave,
    parts_of,
    placed,
    plan_of,
    steps_in,
    unit_of,
)
from attnloom.backends.gluon.builtins import barrier
from attnloom.backends.gluon.rings import get, phase_of, slot_of
from attnloom.backends.triton.device_math import whole32

MIDDLE = gl.constexpr(32)  # columns of the middle panel that a consumer has of dq


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
    P: gl.constexpr = cfg.PANELS
    k0, k1 = mem.k.index(2 * WHICH), mem.k.index(P + 2 * WHICH)
    wide = dq_product(mem, n, k0, k1, 0, 0, cfg.D, cfg)
    k0 = mem.k.index(1).slice(WHICH * MIDDLE, MIDDLE, dim=1)
    k1 = mem.k.index(P + 1).slice(WHICH * MIDDLE, MIDDLE, dim=1)
    return wide, dq_product(mem, n, k0, k1, 0, 0, MIDDLE, cfg)


@gluon.jit
def _add_late_dq(mem, n, line, dq_ptr, places, which, cfg: gl.constexpr):
    """dq of step n, if there is one, from start to end."""
    mbarrier.wait(mem.ds_full.index(n & 1), (n >> 1) & 1, pred=n >= 0)
    wide, narrow = _start_dq(mem, n, which, cfg)
    wide, narrow = warpgroup_mma_wait(0, [wide, narrow])
    mbarrier.arrive(mem.ds_empty.index(n & 1), pred=n >= 0)
    if n >= 0:
        add_dq(dq_ptr, places[0], line, wide, cfg)
        add_dq(dq_ptr, places[1], line, narrow, cfg)


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
    base, first = numbers[1], numbers[3]
    s, dk, line_before = state
    slot, phase = slot_of(n, cfg), phase_of(n, cfg)
    queries, row, partial = queries_of(mem, slot, L, cfg)
    corner = (row, first)
    pieces = look_up(context, corner, cfg)
    mbarrier.wait(mem.do_full.index(slot), phase)
    dp = start_dp(mem, n, which, L, cfg)
    none = (0.0,)
    p, rest = probabilities(
        s, context, none, pieces, corner, mem, n, 0, queries, keys, partial, numbers, cfg
    )
    weight = weighted(p, rest, cfg)
    dp = warpgroup_mma_wait(0, [dp])
    dp = less_delta(dp, mem, slot, L, cfg)
    mbarrier.arrive(mem.do_empty.index(slot))
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
    s_next = start_scores(mem, n + 1, base, which, L, cfg)
    wide, narrow = warpgroup_mma_wait(cfg.PANELS, [wide, narrow])
    mbarrier.arrive(mem.ds_empty.index(before & 1), pred=n > 0)
    if n > 0:
        add_dq(dq_ptr, places[0], line_before, wide, cfg)
        add_dq(dq_ptr, places[1], line_before, narrow, cfg)
    s_next = warpgroup_mma_wait(0, [s_next])
    return s_next, (left, middle, right), line


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
    places = (dq_places(own, cfg.D, cfg), dq_places(middle, MIDDLE, cfg))
    zeros = gl.zeros([HALF, cfg.D], gl.float32, DK)
    dk = (zeros, zeros, zeros)
    factor, base, outgoing = scales
    numbers = (factor, base, kv_len, row, q_offset, kv_offset)
    total = all_steps(at, cfg)
    mbarrier.wait(mem.kv_full.index(0), 0)
    mbarrier.wait(mem.q_full.index(0), 0, pred=total > 0)
    s = warpgroup_mma_wait(0, [start_scores(mem, 0, base, which, L, cfg)])
    n = 0
    line = -1
    for unit in range(0, parts_of(at, cfg)):
        b, h = unit_of(at, unit)
        steps = steps_in(at, unit, total, cfg)
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
    place = (at.b_kv, at.h_kv, row)
    leave(dk_desc, mem.k, which * cfg.PANELS, dk, outgoing, place, cfg.D, cfg)
    tma.store_wait(0)


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
            (load_tile, (q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg)),
        ],
        [4, 1],
        [cfg.REGISTERS, cfg.LOAD_REGISTERS],
    )  # fmt: skip
