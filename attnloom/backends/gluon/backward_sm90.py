"""dq, dk and dv on Hopper: a tile is 128 keys of a key head, over the live queries of its group.

Five products a step by recomputation (Dao et al. 2022, 2023), with a warp that loads and two
warpgroups that own half of the keys each (Shah et al. 2024). Scores are kept transposed, so that p
and dscore are left operands of dv and dk in registers; dscore also goes to shared memory, where dq
of both halves is formed a step late, so that nobody waits for the other half of the same step. dq
is added to float32 memory in the order of registers, 16 bytes a lane (`finish_kernel` of
backward_around.py puts it in order): scalar additions took 25% longer for the whole kernel, TMA
reductions 5% (H200, D=128 and 64).

    DQ_APART   dq by a third warpgroup; where registers allow it (D and Dv up to 64)
    EARLY      scores of the next step start before this step's exponentials (with DQ_APART)
    FOLD       S and dP start from -lse and -delta in place of 0; without a score_mod only
    DV_EARLY   dv starts before dP is waited for
    DK_SHARED  dk takes dscore from shared memory, too: 16 registers fewer while dv is formed
    NATIVE     dk, dv and dq have 96 columns, as the heads do, and not the 128 of a tile: products
               written out as the forward's (forward_wide.py), dk and dv in three parts
    PREFETCH   what single scores look up is loaded a step ahead, into registers
    PERSISTENT one program a processor draws tiles, and copies for the next one are under way while
               dk and dv leave; otherwise a program has one tile
    NAMED, BY_WARP    how slots go back and dscore is handed over (backward_slots.py)
    OVERLAPS   it starts while prepare_kernel is ending (backward_around.py)
    SWEEPS     heads are drawn, whose dq a program sums by itself (backward_sweep.py)

Glossary: backward_shared.py. Prefixes: p, ds as operands in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_dq import (
    add_late_dq,
    dq_places,
    dq_width,
    finish_step,
    own_queries,
)
from attnloom.backends.gluon.backward_jobs import done_with_job, job_of, wait_for_job
from attnloom.backends.gluon.backward_load import load_tiles
from attnloom.backends.gluon.backward_math import (
    contexts,
    dscores,
    first_sums,
    hidden,
    less_delta,
    look_up,
    probabilities,
    queries_of,
    rows_ahead,
    weighted,
)
from attnloom.backends.gluon.backward_products import (
    add_keys,
    as_left,
    give_ds,
    no_sums,
    slices,
    start_dp,
    start_scores,
)
from attnloom.backends.gluon.backward_shared import (
    HALF,
    KEYS,
    all_steps,
    allocate,
    find_tile,
    keys_slot,
    leave,
    parts_of,
    placed,
    plan_of,
    steps_in,
    unit_of,
)
from attnloom.backends.gluon.backward_slots import (
    done_with_do,
    done_with_q,
    ds_is_there,
    end_slots,
    start_slots,
    wait_for_gradients,
    wait_for_keys,
    wait_for_last_dq,
    wait_for_queries,
)
from attnloom.backends.gluon.rings import get, slot_of
from attnloom.backends.triton.device_math import whole32


@gluon.jit
def _look_up_ahead(mem, n, live, context, first, cfg: gl.constexpr):
    """Pieces of step n, whose tag is there; if it is not live, of queries that exist."""
    tag = gl.where(live, get(mem.tags.index(slot_of(n, cfg))), 0)
    return look_up(context, (tag >> 1, first), cfg)


@gluon.jit
def _step(
    state, n, ends, mem, context, dq_to, places, sinks, numbers, keys, kv, which,
    cfg: gl.constexpr,
):  # fmt: skip
    """One step. state = (its raw scores, dk, dv, line of the step before, sums, pieces), and of the
    next one on return. ends: the first step after the tile, and after those of this context. kv:
    where the tile's keys lie."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    SCORES: gl.constexpr = len(slices(cfg.COLUMNS))  # products of scores
    base, first = numbers[1], numbers[3]
    s, dk, dv, line_before, sums, pieces = state
    slot = slot_of(n, cfg)
    end, stop = ends
    more = n + 1 < end
    if cfg.PERSISTENT:
        kv = bi.unknown(kv)
    queries, row, partial = queries_of(mem, slot, L, cfg)
    corner = (row, first)
    if not cfg.PREFETCH:
        pieces = look_up(context, corner, cfg)
    rows = rows_ahead(context, row, numbers[4], cfg)
    s = hidden(s, context, rows, row, queries, keys, partial, numbers, cfg)
    wait_for_gradients(mem, n, cfg)
    dp = start_dp(mem, n, kv + which, L, cfg)
    if cfg.EARLY:
        wait_for_queries(mem, n + 1, more, cfg)
        s_next = start_scores(mem, n + 1, base, kv + which, L, cfg)
    p, rest = probabilities(
        s, context, sinks, pieces, corner, mem, n, rows, queries, keys, partial, numbers, cfg
    )
    p_left = as_left(p.to(cfg.OPERAND), cfg.DV, cfg)
    weight = weighted(p, rest, cfg)
    following = 0
    if cfg.PREFETCH:
        wait_for_queries(mem, n + 1, more, cfg)
        following = _look_up_ahead(mem, n + 1, n + 1 < stop, context, first, cfg)
    if cfg.DV_EARLY:
        dv = add_keys(p_left, mem.dout, mem.dout_at, slot, dv, cfg.DV, cfg)
    LATER: gl.constexpr = (SCORES if cfg.EARLY else 0) + (1 if cfg.DV_EARLY else 0)
    dp = warpgroup_mma_wait(LATER, [dp])
    dp = less_delta(dp, mem, slot, L, cfg)
    ds, sums = dscores(weight, dp, rest, sums, context, sinks, pieces, corner, queries, keys, cfg)
    ds = ds.to(cfg.OPERAND)
    ds_left = 0
    if not cfg.DK_SHARED:
        ds_left = as_left(ds, cfg.D, cfg)
    if not cfg.DV_EARLY:
        dv = add_keys(p_left, mem.dout, mem.dout_at, slot, dv, cfg.DV, cfg)
    give_ds(mem, n, ds, which, cfg)
    if cfg.DK_SHARED:
        fence_async_shared()
        bi.barrier()
        ds_is_there(mem, n, which, cfg)
        ds_shared = mem.ds.index((n & 1) * 2 + which)
        dk = warpgroup_mma(ds_shared, mem.q.index(slot), dk, is_async=True)
    else:
        dk = add_keys(ds_left, mem.q, mem.q_at, slot, dk, cfg.D, cfg)
        fence_async_shared()
        ds_is_there(mem, n, which, cfg)
    line = line_before
    if cfg.EARLY:
        s_next = warpgroup_mma_wait(2, [s_next])
        dv, p_left = warpgroup_mma_wait(1, [dv, p_left])
        done_with_do(mem, slot, cfg)
        dk, ds_left = warpgroup_mma_wait(0, [dk, ds_left])
        done_with_q(mem, slot, cfg)
    elif cfg.DQ_APART:
        wait_for_queries(mem, n + 1, more, cfg)
        s_next = start_scores(mem, n + 1, base, kv + which, L, cfg)
        dv, p_left = warpgroup_mma_wait(SCORES + 1, [dv, p_left])
        done_with_do(mem, slot, cfg)
        dk, ds_left = warpgroup_mma_wait(SCORES, [dk, ds_left])
        done_with_q(mem, slot, cfg)
        s_next = warpgroup_mma_wait(0, [s_next])
    else:
        s_next, dk, dv, line = finish_step(
            mem, n, (dk, dv), (ds_left, p_left), line_before, base, more, dq_to, places, kv, which,
            cfg,
        )  # fmt: skip
        s_next = warpgroup_mma_wait(0, [s_next])
    return s_next, dk, dv, line, sums, following


@gluon.jit
def _keys_of_tile(
    mem, at, total, num, n, dq_to, places, descs, mods, scales, sizes, which, cfg: gl.constexpr
):
    """dk and dv of the program's num-th tile of `total` steps, the first of which is number n; the
    number after the last. descs: of dk and dv. mods = (arguments of score, of mask, sinks). sizes =
    (KV_LEN, q_offset, kv_offset)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_M, 16])
    row = at.start + which * HALF
    keys = row + gl.arange(0, HALF, gl.SliceLayout(1, L))
    slot = keys_slot(num, cfg)
    kv = slot * 2
    dk = no_sums(cfg.D, cfg)
    dv = no_sums(cfg.DV, cfg)
    score_args, mask_args, sinks = mods
    kv_len, q_offset, kv_offset = sizes
    factor, base, outgoing = scales
    numbers = (factor, base, kv_len, row, q_offset, kv_offset)
    end = n + total
    wait_for_keys(mem, num, slot, True, cfg)
    wait_for_queries(mem, n, total > 0, cfg)
    s = start_scores(mem, n, base, kv + which, L, cfg)
    if cfg.LEAVES_LATE:
        if num > 0:
            tma.store_wait(0)
            done_with_job(mem, num - 1)
    s = warpgroup_mma_wait(0, [s])
    line = -1
    for unit in range(0, parts_of(at, cfg)):
        b, h = unit_of(at, unit)
        steps = steps_in(at, unit, total, cfg)
        context = contexts(score_args, mask_args, b, h, keys, row, kv_offset, cfg)
        sums = first_sums(gl.SliceLayout(1, L), cfg)
        pieces = 0
        if cfg.PREFETCH:
            pieces = _look_up_ahead(mem, n, steps > 0, context, row, cfg)
        stop = n + steps
        while n < stop:
            state = (s, dk, dv, line, sums, pieces)
            s, dk, dv, line, sums, pieces = _step(
                state, n, (end, stop), mem, context, dq_to, places, sinks, numbers, keys, kv,
                which, cfg,
            )  # fmt: skip
            n += 1
        if cfg.HAS_SINKS:
            args, head, column = context[4]
            cfg.GRAD_FLUSH(args, sinks, head, column, b, h, keys, sums)
    last = n - 1
    if not cfg.DQ_APART:
        add_late_dq(mem, last, total > 0, line, dq_to, places, kv, which, cfg)
    b, h = at.b_kv, at.h_kv
    if cfg.PERSISTENT:
        tile, b, h, _ = job_of(mem, num)
        row = tile * KEYS + which * HALF
    if not cfg.NATIVE:
        dk, dv = (dk,), (dv,)
    leave(descs[1], mem.v, kv + which, dv, 1.0, (b, h, row), cfg.DV, cfg)
    # keys are read for dq of both halves
    wait_for_last_dq(mem, last, total > 0, which, cfg)
    leave(descs[0], mem.k, kv + which, dk, outgoing, (b, h, row), cfg.D, cfg)
    if not cfg.LEAVES_LATE:
        tma.store_wait(0)
        if cfg.PERSISTENT:
            done_with_job(mem, num)
    return n


@gluon.jit
def _own_keys(mem, plan, mine, dq_to, descs, mods, scales, sizes, which, cfg: gl.constexpr):
    """What a consumer does. mine: see `load_tiles`; the others: see `_keys_of_tile`."""
    WIDTH: gl.constexpr = dq_width(cfg)
    first = 0 if WIDTH == cfg.D else which * WIDTH
    places = dq_places(first, WIDTH, cfg)
    start_slots(mem, which, cfg)
    if cfg.PERSISTENT:
        n = 0
        num = 0
        wait_for_job(mem, 0)
        tile, b_kv, h_kv, total = job_of(mem, 0)
        while tile >= 0:
            at = placed(plan, (tile, b_kv, h_kv), cfg)
            n = _keys_of_tile(
                mem, at, total, num, n, dq_to, places, descs, mods, scales, sizes, which, cfg
            )
            num += 1
            wait_for_job(mem, num)
            tile, b_kv, h_kv, total = job_of(mem, num)
        if cfg.LEAVES_LATE:
            tma.store_wait(0)
    else:
        at = placed(plan, mine, cfg)
        _keys_of_tile(
            mem, at, all_steps(at, cfg), 0, bi.scalar(0, gl.int32), dq_to, places, descs, mods,
            scales, sizes, which, cfg,
        )  # fmt: skip
    end_slots(mem, which, cfg)


@gluon.jit
def _consumer(
    mem, plan, mine, dq_to, descs, mods, scales, sizes, NUMBER: gl.constexpr, cfg: gl.constexpr
):
    """The partition of a consumer; why its number is a value: forward_sm90.py."""
    number = bi.scalar(NUMBER, gl.int32)
    _own_keys(mem, plan, mine, dq_to, descs, mods, scales, sizes, number, cfg)


@gluon.jit(do_not_specialize=["lists", "score_args", "mask_args", "scales", "shape"])
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, stats, dk_desc, dv_desc, dq_mem, counter, lists, score_args,
    mask_args, sinks, scales, shape, cfg: gl.constexpr,
):  # fmt: skip
    """scales: factor and base of score_form.py, and what dk and dq are scaled by. shape: see
    backward_shared.plan_of. lists = (offsets, entries, work, batch step, head step, key blocks) of
    the transposed mask; SWEEPS: work is the window. stats: backward.py's, [2, lines]. dq_mem =
    ([lines, D] float32, zeros before; SWEEPS: memory of programs, dq). counter: one int32, 0 before
    and after."""
    mem = allocate(cfg)
    plan = plan_of(lists, shape)
    mine = (0, 0)
    if not cfg.PERSISTENT:
        mine = find_tile(plan, gl.program_id(0), cfg)
    sizes = (whole32(shape, 12), whole32(shape, 21), whole32(shape, 24))
    if cfg.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    dq_to = (dq_mem[0], dq_mem[1], 0, whole32(shape, 9), scales[2])
    if cfg.SWEEPS:
        dq_to = (dq_mem[0], dq_mem[1], gl.load(lists[2]), whole32(shape, 9), scales[2])
    descs, mods = (dk_desc, dv_desc), (score_args, mask_args, sinks)
    DQ_WARPS: gl.constexpr = 4 if cfg.DQ_APART else 0
    bi.warp_specialize(
        [
            (_consumer, (mem, plan, mine, dq_to, descs, mods, scales, sizes, 0, cfg)),
            (_consumer, (mem, plan, mine, dq_to, descs, mods, scales, sizes, 1, cfg)),
            (own_queries, (mem, plan, mine, dq_to, cfg)),
            (load_tiles, (q_desc, do_desc, k_desc, v_desc, stats, mem, plan, mine, counter, cfg)),
        ],
        [4, DQ_WARPS, 1],
        [cfg.REGISTERS, cfg.DQ_REGISTERS, cfg.LOAD_REGISTERS],
    )
