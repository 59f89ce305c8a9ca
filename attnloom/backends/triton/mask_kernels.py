"""From a mask_mod to block lists on the device, in four kernels and a running sum.

Glossary
    tile                Q_BLOCK x KV_BLOCK scores of one unit, a (b, h) of the mask
    line                row of tiles of a unit: unit * num_q_blocks + row
    CHUNK               neighbouring tiles of a line that one program looks at
    part                a subexpression of the mask that depends on one side only (emit_ranges.py)
    code                0 empty, 1 partial, 2 full, 3 open

    summary_kernel      the range of each part over each block: O(Q_LEN + KV_LEN)
    code_kernel         the code of each tile, by intervals
    settle_kernel       the code of each open tile by its scores, piece after piece until one is
                        kept and one is dropped
    write_kernel        codes to entries of BlockLists, at places that a running sum over the
                        numbers of live tiles gives

Scores beyond the lengths do not count: positions are clamped to the last one, which repeats it.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import whole32


@triton.jit
def summary_kernel(rows, columns, args, sizes, cfg: tl.constexpr):
    """One program a block of queries or keys and unit: those of queries first, where they have
    parts. sizes = (units, num_heads, q_len, kv_len, num_q_blocks, num_kv_blocks, ...)."""
    units, num_heads = whole32(sizes, 0), whole32(sizes, 3)
    num_q_blocks, num_kv_blocks = whole32(sizes, 12), whole32(sizes, 15)
    at = tl.program_id(0)
    if cfg.HAS_ROWS:
        row_programs = units * num_q_blocks
    else:
        row_programs = 0
    if at < row_programs:
        if cfg.HAS_ROWS:
            unit, block = at // num_q_blocks, at % num_q_blocks
            q = block * cfg.Q_BLOCK + tl.arange(0, cfg.Q_BLOCK)
            q = tl.minimum(q, whole32(sizes, 6) - 1)
            b, h = unit // num_heads, unit % num_heads
            step = tl.cast(units, tl.int64) * num_q_blocks
            cfg.ROWS(args, b, h, at, q, rows, step)
    else:
        if cfg.HAS_COLUMNS:
            at -= row_programs
            unit, block = at // num_kv_blocks, at % num_kv_blocks
            kv = block * cfg.KV_BLOCK + tl.arange(0, cfg.KV_BLOCK)
            kv = tl.minimum(kv, whole32(sizes, 9) - 1)
            b, h = unit // num_heads, unit % num_heads
            step = tl.cast(units, tl.int64) * num_kv_blocks
            cfg.COLUMNS(args, b, h, at, kv, columns, step)


@triton.jit
def tile_code(args, b, h, q0, q_last, kv0, kv_last, cfg: tl.constexpr):
    """The code of one tile by its scores, PIECE_M x PIECE_N at a time."""
    across: tl.constexpr = cfg.KV_BLOCK // cfg.PIECE_N
    pieces: tl.constexpr = cfg.Q_BLOCK // cfg.PIECE_M * across
    head = cfg.MASK_HEAD(args, b, h)
    some = tl.full((), 0, tl.int32)
    every = tl.full((), 1, tl.int32)
    piece = tl.full((), 0, tl.int32)
    while (piece < pieces) & (some <= every):  # not mixed yet
        q = q0 + piece // across * cfg.PIECE_M + tl.arange(0, cfg.PIECE_M)
        kv = kv0 + piece % across * cfg.PIECE_N + tl.arange(0, cfg.PIECE_N)
        q = tl.minimum(q, q_last)[:, None]  # [PIECE_M, 1]
        kv = tl.minimum(kv, kv_last)[None, :]  # [1, PIECE_N]
        row = cfg.MASK_ROW(args, head, b, h, q)
        kept = cfg.MASK_BODY(args, head, row, b, h, q, kv)
        kept = (kept & (q >= 0) & (kv >= 0)).to(tl.int32)  # [PIECE_M, PIECE_N]
        some = tl.maximum(some, tl.max(tl.max(kept, 1), 0))
        every = tl.minimum(every, tl.min(tl.min(kept, 1), 0))
        piece += 1
    return some + every


@triton.jit
def code_kernel(codes, counts, rows, columns, args, sizes, cfg: tl.constexpr):
    """One program a chunk of a line. codes: [lines, num_kv_blocks] int8. counts: int32, a zero,
    then the number of live and open tiles of each chunk."""
    units, num_heads = whole32(sizes, 0), whole32(sizes, 3)
    q_len, kv_len = whole32(sizes, 6), whole32(sizes, 9)
    num_q_blocks, num_kv_blocks = whole32(sizes, 12), whole32(sizes, 15)
    num_chunks = whole32(sizes, 18)
    pid = tl.program_id(0)
    line, chunk = pid // num_chunks, pid % num_chunks
    unit, row = line // num_q_blocks, line % num_q_blocks
    b, h = unit // num_heads, unit % num_heads

    lanes = tl.arange(0, cfg.CHUNK)
    column = chunk * cfg.CHUNK + lanes
    inside = column < num_kv_blocks
    column = tl.minimum(column, num_kv_blocks - 1)
    q0, kv0 = row * cfg.Q_BLOCK, column * cfg.KV_BLOCK
    q_last = tl.minimum(q0 + cfg.Q_BLOCK, q_len) - 1
    kv_last = tl.minimum(kv0 + cfg.KV_BLOCK, kv_len) - 1

    row_step = tl.cast(units, tl.int64) * num_q_blocks
    column_step = tl.cast(units, tl.int64) * num_kv_blocks
    column_at = unit * num_kv_blocks + column
    # all vectors: Triton's interpreter confuses the type of a scalar comparison that is broadcast
    same = column * 0
    surely, possibly = cfg.RANGES(
        args, rows, row_step, line + same, columns, column_step, column_at,
        b + same, h + same, q0 + same, q_last + same, kv0, kv_last,
    )  # fmt: skip
    code = tl.where(surely & inside, 2, tl.where(possibly & inside, cfg.UNDECIDED, 0))
    place = tl.cast(line, tl.int64) * num_kv_blocks + column
    tl.store(codes + place, code.to(tl.int8), mask=inside)
    tl.store(counts + pid + 1, tl.sum((code > 0).to(tl.int32), 0))
    if pid == 0:
        tl.store(counts, 0)


@triton.jit
def settle_kernel(codes, counts, args, sizes, cfg: tl.constexpr):
    """Decide open tiles. A program looks at every num_programs-th tile, so that neighbours in a
    row, a column or a diagonal, which are open together, are decided side by side."""
    units, num_heads = whole32(sizes, 0), whole32(sizes, 3)
    q_len, kv_len = whole32(sizes, 6), whole32(sizes, 9)
    num_q_blocks, num_kv_blocks = whole32(sizes, 12), whole32(sizes, 15)
    num_chunks = whole32(sizes, 18)
    num_tiles = units * num_q_blocks * num_kv_blocks
    lanes = tl.arange(0, cfg.LOOK)
    begin = tl.program_id(0)
    while begin < num_tiles:
        tiles = begin + lanes * tl.num_programs(0)
        code = tl.load(codes + tiles, mask=tiles < num_tiles, other=0)
        waiting = tl.where(code == cfg.UNDECIDED, lanes, cfg.LOOK)
        at = tl.min(waiting, 0)
        while at < cfg.LOOK:
            tile = begin + at * tl.num_programs(0)
            line, column = tile // num_kv_blocks, tile % num_kv_blocks
            unit, row = line // num_q_blocks, line % num_q_blocks
            q0, kv0 = row * cfg.Q_BLOCK, column * cfg.KV_BLOCK
            q_last = tl.minimum(q0 + cfg.Q_BLOCK, q_len) - 1
            kv_last = tl.minimum(kv0 + cfg.KV_BLOCK, kv_len) - 1
            b, h = unit // num_heads, unit % num_heads
            found = tile_code(args, b, h, q0, q_last, kv0, kv_last, cfg)
            tl.store(codes + tile, found.to(tl.int8))
            if found == 0:
                chunk = line * num_chunks + column // cfg.CHUNK
                tl.atomic_add(counts + chunk + 1, -1, sem="relaxed")
            waiting = tl.where(lanes == at, cfg.LOOK, waiting)
            at = tl.min(waiting, 0)
        begin += cfg.LOOK * tl.num_programs(0)


@triton.jit
def write_kernel(entries, row_offsets, codes, offsets, sizes, cfg: tl.constexpr):
    """One program a chunk of a line, as code_kernel; offsets: the running sum of its counts."""
    num_kv_blocks, num_chunks = whole32(sizes, 15), whole32(sizes, 18)
    pid = tl.program_id(0)
    line, chunk = pid // num_chunks, pid % num_chunks
    lanes = tl.arange(0, cfg.CHUNK)
    column = chunk * cfg.CHUNK + lanes
    place = tl.cast(line, tl.int64) * num_kv_blocks + column
    code = tl.load(codes + place, mask=column < num_kv_blocks, other=0)
    live = (code > 0).to(tl.int32)
    begin = tl.load(offsets + pid)
    at = begin + tl.cumsum(live, 0) - 1
    if cfg.SEPARATE_FULL:
        entry = column * 2 + (code == 1).to(tl.int32)
    else:
        entry = column * 2 + 1
    tl.store(entries + at, entry, mask=live > 0)
    if chunk == 0:
        tl.store(row_offsets + line, begin)
    if pid == tl.num_programs(0) - 1:
        tl.store(row_offsets + line + 1, tl.load(offsets + pid + 1))
