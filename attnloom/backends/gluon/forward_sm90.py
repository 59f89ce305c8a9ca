"""Forward of fused attention for Hopper: warp-specialised online softmax over live key blocks.

Algorithm: FlashAttention-2 and -3 (Dao 2023, Shah et al. 2024) on the block lists of a BlockMask.
Parallelisation: one program a processor. A producer warp draws tiles and fills rings of keys and
values by TMA; each of up to three consumers owns ROWS queries of the tile and all of its keys.

Heads of 129 to 192 may lie in three PANELS of 64 columns, where a tile of a power of two would have
256: as many products of a step, each a group of its own to wait for, and as many accumulators. Of
a tile of 128, q . k^T may leave out columns that heads of 65 to 96 do not use (REST).

Steps of a consumer: forward_steps.py; those that it passes over: forward_passed.py; tiles one
behind the other: forward_joined.py.

Glossaries: forward_shared.py, forward_math.py, backends/triton/forward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.forward_columns import write_columns
from attnloom.backends.gluon.forward_joined import consume_joined
from attnloom.backends.gluon.forward_load import load_tiles
from attnloom.backends.gluon.forward_math import (
    contexts,
    row_sums,
)
from attnloom.backends.gluon.forward_passed import (
    own_steps,
    pass_over_all,
)
from attnloom.backends.gluon.forward_products import take_queries
from attnloom.backends.gluon.forward_results import store_results
from attnloom.backends.gluon.forward_shared import (
    allocate,
    query_phase,
    query_slot,
    take_job,
)
from attnloom.backends.gluon.forward_steps import overlapped_tile, plain_tile
from attnloom.backends.gluon.forward_strips import STRIP, three_parts
from attnloom.backends.gluon.rings import (
    QUERIES_THERE,
    first_turn,
    last_turn,
    leave_queries,
    wait_there,
)
from attnloom.backends.triton.device_math import whole32


@gluon.jit
def consume(out_desc, outs, mem, sizes, score_args, mask_args, scales, consumer, cfg: gl.constexpr):
    """What a consumer does. sizes = (Hq, Q_LEN, KV_LEN, q_offset, kv_offset)."""
    N: gl.constexpr = STRIP if cfg.STRIPS else cfg.TILE_N
    PART: gl.constexpr = STRIP if cfg.STRIPS else cfg.PART
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, PART, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [cfg.WARPS, 1], [16, cfg.PART, 16])
    heads, q_len, kv_len, q_offset, kv_offset = sizes
    factor, base = scales
    if cfg.BAKED:
        # literals cost no registers: D = 128 causal +1-2% (H200)
        factor, base = cfg.FACTOR, cfg.BASE
    at = (q_offset, kv_offset, kv_len, factor, base, mem.values_at)
    n = 0
    num_tiles = 0
    first_turn(consumer, cfg)
    tile, unit, steps, dead = take_job(mem, 0, cfg)
    while tile >= 0:
        b, h = unit // heads, unit % heads
        row = (tile * cfg.CONSUMERS + consumer) * cfg.ROWS
        queries = row + gl.arange(0, cfg.ROWS, gl.SliceLayout(1, L))
        context = contexts(score_args, mask_args, b, h, row, queries, q_offset, cfg)
        slot = query_slot(num_tiles, consumer, cfg)
        wait_there(mem, mem.q_full, slot, query_phase(num_tiles, cfg), QUERIES_THERE, cfg)
        first = slot * cfg.PANELS
        q = take_queries(mem, first, L, cfg)
        if cfg.Q_KEPT == cfg.PANELS and not cfg.OUT_IN_Q:
            leave_queries(mem, slot, cfg)
        steps, passed, idle = own_steps(steps, dead, consumer, row, q_len, cfg)
        n = pass_over_all(mem, n, idle, consumer, cfg)
        if cfg.OVERLAP:
            acc, m_i, l_i, n = overlapped_tile(
                q, mem, n, steps, passed, context, at, consumer, L, OUT, cfg
            )
        else:
            acc, m_i, l_i, n = plain_tile(
                q, mem, n, steps, passed, context, at, consumer, L, OUT, cfg
            )
        l_i = row_sums(l_i, L, cfg)
        if cfg.STRIPS:
            acc = three_parts(acc, RESULT)
        place = (b, h, unit, row, queries, q_len)
        if cfg.OUT_IN_Q:
            store_results(out_desc, outs, mem, first, acc, m_i, l_i, place, base, RESULT, cfg)
            tma.store_wait(0)
            leave_queries(mem, slot, cfg)
        else:
            if cfg.Q_KEPT < cfg.PANELS and not cfg.OUT_RING:
                leave_queries(mem, slot, cfg)
            first = consumer * (2 if cfg.OUT_RING else cfg.PANELS)
            store_results(out_desc, outs, mem, first, acc, m_i, l_i, place, base, RESULT, cfg)
        num_tiles += 1
        tile, unit, steps, dead = take_job(mem, num_tiles, cfg)
    tma.store_wait(0)
    last_turn(consumer, cfg)


@gluon.jit
def _consumer(
    out_desc, outs, mem, sizes, score_args, mask_args, scales, NUMBER: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """The partition of a consumer. Its number is a value, so that Triton reads the functions above
    for one consumer and copies what it made of them (0.1 to 0.2 s a kernel, Triton 3.6)."""
    number = bi.scalar(NUMBER, gl.int32)
    if cfg.JOINED:
        consume_joined(out_desc, outs, mem, sizes, score_args, mask_args, scales, number, cfg)
    else:
        consume(out_desc, outs, mem, sizes, score_args, mask_args, scales, number, cfg)


@gluon.jit(do_not_specialize=["lists", "score_args", "mask_args", "factor", "base", "shape"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, max_scores, counter, lists, score_args, mask_args,
    factor, base, shape, cfg: gl.constexpr,
):  # fmt: skip
    """shape = (Hq, Q_LEN, KV_LEN, q_offset, kv_offset, GROUP, row tiles, heads of a batch, B * Hq,
    steps without lists, tiles of the launch, kv batch step 0/1, key block or tile that overhangs
    KV_LEN or -1), packed. counter: one int32, 0 before and after. lists = (entries, work, batch
    step, head step), see backends/triton/lists.py. x = factor * (q . k) before the score_mod, and
    2**(base * x) is a weight."""
    mem = allocate(cfg)
    heads = whole32(shape, 0)
    sizes = (
        heads, whole32(shape, 3), whole32(shape, 6), whole32(shape, 9), whole32(shape, 12),
    )  # fmt: skip
    plan = (
        heads, whole32(shape, 15), whole32(shape, 18), whole32(shape, 21), whole32(shape, 24),
        whole32(shape, 27), whole32(shape, 30), whole32(shape, 33), whole32(shape, 36),
    )  # fmt: skip
    if cfg.STRIPS:
        plan += (sizes[2],)
    listed = (lists[0], lists[1], whole32(lists, 2), whole32(lists, 5))
    outs, scales = (lse, max_scores), (factor, base)
    SECOND_WARPS: gl.constexpr = 4 if cfg.CONSUMERS > 1 else 0
    THIRD_WARPS: gl.constexpr = 4 if cfg.CONSUMERS == 3 else 0
    COLUMN_WARPS: gl.constexpr = 1 if cfg.NUM_COLUMNS > 0 else 0
    bi.warp_specialize(
        [
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 0, cfg)),
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 1, cfg)),
            (_consumer, (out_desc, outs, mem, sizes, score_args, mask_args, scales, 2, cfg)),
            (load_tiles, (q_desc, k_desc, v_desc, mem, counter, listed, plan, cfg)),
            (write_columns, (mem, heads, sizes[4], mask_args, cfg)),
        ],
        [SECOND_WARPS, THIRD_WARPS, 1, COLUMN_WARPS],
        [cfg.REGISTERS, cfg.REGISTERS, cfg.LOAD_REGISTERS, cfg.LOAD_REGISTERS],
    )
