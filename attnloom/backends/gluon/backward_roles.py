"""dq, dk and dv on Hopper for heads of 129 to 192: a tile is 96 keys, one consumer has dv, the
other dk.

dk and dv of 128 keys and 192 columns are 192 registers a thread of two consumers, of 96 keys 144:
beside them scores have room. Each consumer has all of one of them, transposed: [columns, keys], so
that instructions are of 64 columns and 96 keys and read as little shared memory as two consumers
may (products_96.py): 300 KB a step of 64 queries, 344 with what is stored, where two consumers that
own half of the keys each read 61 KB more for scores and 49 more for dk and dv. Scores are not
transposed: rows of queries.

    consumer of values    S = q . k^T, p, dv^T += dout^T . p, half of the columns of dq
    consumer of keys      dP = dout . v^T, dscore, dk^T += q^T . dscore, the other half

p goes from one to the other in shared memory twice: rounded to halves for dv, and in float16 for
dscore, where it has eight times the precision of bfloat16. So that small ones keep it, all are
2^SHIFT times what they are, and dv, dk and dq as much, which nothing but their last scaling
notices. dscore goes the other way for dq, which the consumer of values forms a step late, the other
at once. dv and dk of a step are formed at once, while dq is added to memory, and the next step's
scores and dP behind them. A step late, under the exponentials of the next, they cost 4 to 6% of the
time (H200, docs/log.md).

Scores and dP past the last step, and dq before the first, are formed of whatever lies there and
used by nobody; dv and dk of the first step are not added to what was there. So accumulators need no
zeros, and nothing is in flight from one turn of the loop to the next.

Glossary: backward_shared.py, roles_load.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnloom.backends.gluon import addresses
from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_shared import (
    DO_LEFT,
    DO_THERE,
    DS_LEFT,
    DS_THERE,
    KV_THERE,
    LINES,
    Q_LEFT,
    Q_THERE,
    all_steps,
    find_tile,
    plan_of,
)
from attnloom.backends.gluon.builtins import exp2_fast
from attnloom.backends.gluon.products_96 import PIECE, lane_place, store_96
from attnloom.backends.gluon.rings import get
from attnloom.backends.gluon.roles_load import load
from attnloom.backends.gluon.roles_products import (
    add_dq,
    done,
    dq_places,
    start_dk,
    start_dp,
    start_dq,
    start_dv,
    start_scores,
    zeros,
)
from attnloom.backends.gluon.roles_shared import (
    GROUPS,
    KEYS,
    P_LEFT,
    P_THERE,
    allocate,
    leave,
    placed,
)
from attnloom.backends.triton.device_math import whole32


@gluon.jit
def _less_of(mem, slot, cfg: gl.constexpr):
    """What a step's exponents are lessened by, a row."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    less = mem.lse.index(slot).load(gl.SliceLayout(1, L))
    if cfg.SHIFT > 0:
        less = less - cfg.SHIFT
    return less


@gluon.jit
def _tag_of(mem, slot, cfg: gl.constexpr):
    """The tag of a step; 0 where none is masked."""
    if cfg.MAY_MASK:
        return get(mem.tags.index(slot))
    else:
        return 0


@gluon.jit
def _weights(s, less, numbers):
    """p of PIECE keys, 2^SHIFT times."""
    return exp2_fast(s * (numbers[0] * numbers[1]) - less[:, None])


@gluon.jit
def _masked(p, tag, first, PART: gl.constexpr, unit, mask_args, numbers, cfg: gl.constexpr):
    """p of a tile's piece PART, 0 where its keys are not seen. first: key of the tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    place = gl.arange(0, PIECE, gl.SliceLayout(0, L))
    first += PART * PIECE
    flags = tag >> (2 * PART + 1)
    _, _, kv_len, kv_offset, q_offset = numbers
    if cfg.HAS_MASK:
        b, h = unit
        q = (tag >> 7) * cfg.TILE_M + q_offset + gl.arange(0, cfg.TILE_M, gl.SliceLayout(1, L))
        kv = first + kv_offset + place
        head = cfg.MASK_HEAD(mask_args, b, h)
        column = cfg.MASK_COLUMN(mask_args, head, b, h, kv)
        row = cfg.MASK_ROW(mask_args, head, b, h, q)
        edges = cfg.MASK_EDGES(mask_args, head, row, b, h, q, first + kv_offset, 0, False)
        keep = cfg.MASK_BODY(mask_args, head, row, column, edges, b, h, q, kv, place, 1, False)
        seen = gl.where(keep, p, 0.0)
        if cfg.HAS_LISTS:
            # blocks say what full ones show, whatever the mask
            seen = gl.where((flags & 1) != 0, seen, p)
        p = seen
    if cfg.HAS_LISTS:
        p = gl.where((flags & 2) != 0, p, 0.0)
    if cfg.HAS_TAIL:
        p = gl.where((first + place < kv_len)[None, :], p, 0.0)
    return p


@gluon.jit
def _give_weights(s, mem, n, of_rows, at, unit, mask_args, numbers, lane, cfg: gl.constexpr):
    """p of step n, to the other consumer; halves of it. of_rows: what exponents are lessened by,
    and the tag."""
    less, tag = of_rows
    p0 = _weights(s[0], less, numbers)
    p1 = _weights(s[1], less, numbers)
    p2 = _weights(s[2], less, numbers)
    if cfg.MAY_MASK:
        if (tag & 1) != 0:
            # what follows from keys is computed here, and not ahead of the loop
            first = bi.unknown(at.start)
            p0 = _masked(p0, tag, first, 0, unit, mask_args, numbers, cfg)
            p1 = _masked(p1, tag, first, 1, unit, mask_args, numbers, cfg)
            p2 = _masked(p2, tag, first, 2, unit, mask_args, numbers, cfg)
    addresses.wait(mem.block, P_LEFT, (n & 1) ^ 1)
    exact = (p0.to(gl.float16), p1.to(gl.float16), p2.to(gl.float16))
    store_96(exact, mem.exact_at, lane)
    addresses.arrive(mem.block, P_THERE)
    return p0.to(cfg.OPERAND), p1.to(cfg.OPERAND), p2.to(cfg.OPERAND)


@gluon.jit
def _keep_weights(p, mem, lane):
    """p of a step, for dv."""
    # all warps read what all warps stored
    bi.barrier()
    store_96(p, mem.p_at, lane)
    fence_async_shared()
    bi.barrier()


@gluon.jit
def _dscores(dp, less, mem, cfg: gl.constexpr):
    """dscore of a step, whose p is there."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    less = less[:, None]
    p0 = mem.exact.index(0).load(L).to(gl.float32)
    p1 = mem.exact.index(1).load(L).to(gl.float32)
    p2 = mem.exact.index(2).load(L).to(gl.float32)
    ds0 = (p0 * (dp[0] - less)).to(cfg.OPERAND)
    ds1 = (p1 * (dp[1] - less)).to(cfg.OPERAND)
    ds2 = (p2 * (dp[2] - less)).to(cfg.OPERAND)
    addresses.arrive(mem.block, P_LEFT)
    return ds0, ds1, ds2


@gluon.jit
def _give_dscores(ds, mem, n, lane):
    """To both consumers."""
    slot = n & 1
    addresses.wait(mem.block, slot + DS_LEFT, ((n >> 1) & 1) ^ 1)
    store_96(ds, mem.ds_at + slot * (64 * KEYS * 2), lane)
    fence_async_shared()
    addresses.arrive(mem.block, slot + DS_THERE)
    bi.barrier()


@gluon.jit
def _values(mem, at, total, dq_ptr, places, unit, mask_args, numbers, lane, cfg: gl.constexpr):
    """dv of all steps. That of a step runs while dq of the one before is added to memory."""
    dv = zeros(cfg.VALUE_PANELS)
    addresses.wait_if(total > 0, mem.block, Q_THERE, 0)
    s = done(0, start_scores(mem, 0, cfg))
    for n in range(0, total):
        slot, before, after = n & 1, n - 1, n + 1
        of_rows = (_less_of(mem, slot, cfg), _tag_of(mem, slot, cfg))
        addresses.arrive(mem.block, slot + Q_LEFT)
        p = _give_weights(s, mem, n, of_rows, at, unit, mask_args, numbers, lane, cfg)
        _keep_weights(p, mem, lane)
        line = get(mem.lines.index(before & (LINES - 1)))
        addresses.wait_if(n > 0, mem.block, (before & 1) + DS_THERE, (before >> 1) & 1)
        dq = start_dq(mem, before, 0, cfg)
        addresses.wait(mem.block, slot + DO_THERE, (n >> 1) & 1)
        dv = start_dv(mem, n, n > 0, dv, cfg)
        dq = done(1, dq)
        addresses.arrive_if(n > 0, mem.block, (before & 1) + DS_LEFT)
        if n > 0:
            add_dq(dq_ptr, places, line, dq, cfg)
        addresses.wait_if(after < total, mem.block, (after & 1) + Q_THERE, (after >> 1) & 1)
        s = start_scores(mem, after, cfg)
        dv = done(1, dv)
        addresses.arrive(mem.block, slot + DO_LEFT)
        s = done(0, s)
    return dv


@gluon.jit
def _own_values(mem, at, dq_ptr, dv_desc, mask_args, numbers, cfg: gl.constexpr):
    """What the consumer of values does."""
    unit = (at.b_kv, at.h_kv * at.group)
    places = dq_places(0, cfg)
    total = all_steps(at, cfg)
    addresses.wait(mem.block, KV_THERE, 0)
    lane = lane_place()
    dv = _values(mem, at, total, dq_ptr, places, unit, mask_args, numbers, lane, cfg)
    if total > 0:
        last = total - 1
        line = get(mem.lines.index(last & (LINES - 1)))
        addresses.wait(mem.block, (last & 1) + DS_THERE, (last >> 1) & 1)
        dq = done(0, start_dq(mem, last, 0, cfg))
        addresses.arrive(mem.block, (last & 1) + DS_LEFT)
        add_dq(dq_ptr, places, line, dq, cfg)
    # values were read for dP of all steps: their dscore is there
    leave(dv_desc, mem.v, dv, 1.0 / (1 << cfg.SHIFT), at, cfg.VALUE_PANELS, cfg)


@gluon.jit
def _keys(mem, total, dq_ptr, places, lane, cfg: gl.constexpr):
    """dk of all steps. That of a step runs while dq is added to memory, the next dP after it."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    dk = zeros(cfg.PANELS)
    addresses.wait_if(total > 0, mem.block, DO_THERE, 0)
    dp = done(0, start_dp(mem, 0, cfg))
    for n in range(0, total):
        slot, after = n & 1, n + 1
        less = mem.delta.index(slot).load(gl.SliceLayout(1, L))
        addresses.arrive(mem.block, slot + DO_LEFT)
        addresses.wait(mem.block, P_THERE, n & 1)
        ds = _dscores(dp, less, mem, cfg)
        _give_dscores(ds, mem, n, lane)
        line = get(mem.lines.index(n & (LINES - 1)))
        dq = start_dq(mem, n, 1, cfg)
        addresses.wait(mem.block, slot + Q_THERE, (n >> 1) & 1)
        dk = start_dk(mem, n, n > 0, dk, cfg)
        dq = done(1, dq)
        add_dq(dq_ptr, places, line, dq, cfg)
        addresses.wait_if(after < total, mem.block, (after & 1) + DO_THERE, (after >> 1) & 1)
        dp = start_dp(mem, after, cfg)
        dk = done(1, dk)
        addresses.arrive(mem.block, slot + Q_LEFT)
        dp = done(0, dp)
    return dk


@gluon.jit
def _own_keys(mem, at, dq_ptr, dk_desc, outgoing, cfg: gl.constexpr):
    """What the consumer of keys does."""
    places = dq_places(1, cfg)
    total = all_steps(at, cfg)
    addresses.wait(mem.block, KV_THERE, 0)
    lane = lane_place()
    dk = _keys(mem, total, dq_ptr, places, lane, cfg)
    if total > 0:
        # keys are read for dq of the other consumer, too
        last = total - 1
        addresses.wait(mem.block, (last & 1) + DS_LEFT, (last >> 1) & 1)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = bi.reinterpret(mem.k, cfg.OPERAND, [cfg.PANELS * GROUPS, PIECE, 64], WIDE)
    leave(dk_desc, tiles, dk, outgoing / (1 << cfg.SHIFT), at, cfg.PANELS, cfg)


@gluon.jit(do_not_specialize=["lists", "score_args", "mask_args", "scales", "shape"])
def roles_kernel(
    q_desc, do_desc, k_desc, v_desc, stats, dk_desc, dv_desc, dq_ptr, lists, score_args, mask_args,
    scales, shape, cfg: gl.constexpr,
):  # fmt: skip
    """scales, stats, dq_ptr: as backward_kernel has them, dq_ptr with 192 columns of 2^SHIFT times
    dq. shape: see backward_shared.plan_of. lists: see lists_backward.tile_lists."""
    mem = allocate(cfg)
    plan = plan_of(lists, shape)
    at = placed(plan, find_tile(plan, gl.program_id(0), cfg))
    numbers = (scales[0], scales[1], whole32(shape, 12), whole32(shape, 24), whole32(shape, 21))
    if cfg.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    bi.warp_specialize(
        [
            (_own_values, (mem, at, dq_ptr, dv_desc, mask_args, numbers, cfg)),
            (_own_keys, (mem, at, dq_ptr, dk_desc, scales[2], cfg)),
            (load, (q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg)),
        ],
        [4, 1],
        [cfg.REGISTERS, cfg.LOAD_REGISTERS],
    )  # fmt: skip
    # written and read by address: Triton would give their memory away
    mem.p._keep_alive()
    mem.ds._keep_alive()
    mem.exact._keep_alive()
