"""Lists of blocks in the order of their readers, from BlockLists, each in one kernel.

Glossary
    unit                a (b, h) of the mask; it has num_q_blocks rows of blocks
    row, column         a block of queries, of keys
    tile                rows of queries that one program of an attention kernel takes
    LANES               rows, columns or tiles that a program looks at together

    rank_kernel         tiles of each unit by falling number of entries
    turn_kernel         entries by columns, where BlockLists has them by rows
    join_kernel         one list for all consumers of a tile (gluon/merged_lists.py)

Nothing is sorted: the place of an entry or a tile is how many come before it, which is counted.
That is more work than sorting and little for a mask's numbers of blocks, and it is one small module
in place of a sort's, a search's and those of every operator around them, whose first use in a
process takes 5 to 35 ms each.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import whole32


@triton.jit
def rank_kernel(work, bounds, sizes, cfg: tl.constexpr):
    """One program LANES tiles of a unit.

    work: [units, tiles, 3], tile, first entry, last entry + 1. bounds: int64; the entries of row r
    are bounds[r * step] .. bounds[r * step + 1].
    sizes = (tiles, rows of a unit, tiles a row, step).
    """
    num_tiles = whole32(sizes, 0)
    num_chunks = tl.cdiv(num_tiles, cfg.LANES)
    pid = tl.program_id(0)
    unit, chunk = pid // num_chunks, pid % num_chunks
    tile = chunk * cfg.LANES + tl.arange(0, cfg.LANES)
    first, last = _bounds_of(bounds, unit, tile, sizes)
    count = (last - first).to(tl.int32)[:, None]
    rank = tl.zeros([cfg.LANES], tl.int32)
    start = num_tiles * 0
    while start < num_tiles:
        other = start + tl.arange(0, cfg.LANES)
        begin, end = _bounds_of(bounds, unit, other, sizes)
        others = tl.where(other < num_tiles, (end - begin).to(tl.int32), -1)[None, :]
        # equal tiles keep their order
        earlier = (others == count) & (other[None, :] < tile[:, None])
        rank += tl.sum(((others > count) | earlier).to(tl.int32), 1)  # [LANES, LANES]
        start += cfg.LANES
    inside = tile < num_tiles
    place = work + (tl.cast(unit, tl.int64) * num_tiles + rank) * 3
    tl.store(place, tile.to(work.dtype.element_ty), mask=inside)
    tl.store(place + 1, first.to(work.dtype.element_ty), mask=inside)
    tl.store(place + 2, last.to(work.dtype.element_ty), mask=inside)


@triton.jit
def _bounds_of(bounds, unit, tile, sizes):
    """First entry and last entry + 1 of tiles; of one past the end, those of the last."""
    num_tiles, num_rows = whole32(sizes, 0), whole32(sizes, 3)
    per_row, step = whole32(sizes, 6), whole32(sizes, 9)
    row = unit * num_rows + tl.minimum(tile, num_tiles - 1) // per_row
    place = bounds + tl.cast(row, tl.int64) * step
    return tl.load(place), tl.load(place + 1)


@triton.jit
def _entries_of(row_offsets, unit, row, num_rows):
    """First entry and last entry + 1 of rows of a unit; those past its end have none."""
    place = row_offsets + unit * num_rows + tl.minimum(row, num_rows - 1)
    first, last = tl.load(place), tl.load(place + 1)
    return first, tl.where(row < num_rows, last, first)


@triton.jit
def _lower_bound(entries, first, last, entry, halvings):
    """The first place from `first` on, of ascending entries, that holds no less; `last` if none."""
    step = halvings * 0
    while step < halvings:
        is_open = first < last
        middle = first + (last - first) // 2
        found = tl.load(entries + middle, mask=is_open, other=0)
        first = tl.where(is_open & (found < entry), middle + 1, first)
        last = tl.where(is_open & (found >= entry), middle, last)
        step += 1
    return first


@triton.jit
def turn_kernel(
    turned, offsets, narrow_offsets, window, entries, row_offsets, sizes, cfg: tl.constexpr
):
    """One program a column of a unit.

    turned: int32 entries by columns, q_block * 2 + partial, or those of SweptLists where SWEEPS,
    whose window (zero before) grows to its size here. offsets: int64 [columns + 1], and the same in
    int32. sizes = (rows of a unit, columns of a unit, halvings, q_block, slack).
    """
    num_rows, num_columns = whole32(sizes, 0), whole32(sizes, 3)
    halvings = whole32(sizes, 6)
    pid = tl.program_id(0)
    unit, column = pid // num_columns, pid % num_columns
    lanes = tl.arange(0, cfg.LANES)
    # entries of the unit in columns before this one
    begin = tl.load(row_offsets + unit * num_rows)
    low, high = num_rows, num_rows * 0 - 1
    start = num_rows * 0
    while start < num_rows:
        row = start + lanes
        first, last = _entries_of(row_offsets, unit, row, num_rows)  # [LANES]
        at = _lower_bound(entries, first, last, column * 2, halvings)
        begin += tl.sum(at - first, 0)
        if cfg.SWEEPS:
            # one that is seen by a single tile leaves nothing, but for steps past Q_LEN
            kept = (last - first > 1) | ((last > first) & (row == num_rows - 1))
            head = tl.load(entries + first, mask=kept, other=0) >> 1
            tail = tl.load(entries + last - 1, mask=kept, other=0) >> 1
            low = tl.minimum(low, tl.min(tl.where(kept & (tail >= column), row, num_rows), 0))
            high = tl.maximum(high, tl.max(tl.where(kept & (head <= column), row, -1), 0))
        start += cfg.LANES
    tl.store(offsets + pid, begin)
    tl.store(narrow_offsets + pid, begin.to(tl.int32))
    if cfg.SWEEPS:
        rows = tl.maximum(high - low + 1, 1) * whole32(sizes, 9) + whole32(sizes, 12)
        power = num_rows * 0 + 1
        while power < rows:
            power *= 2
        tl.atomic_max(window, power, sem="relaxed")

    start = num_rows * 0
    while start < num_rows:
        row = start + lanes
        first, last = _entries_of(row_offsets, unit, row, num_rows)
        at = _lower_bound(entries, first, last, column * 2, halvings)
        entry = tl.load(entries + at, mask=at < last, other=-1)
        live = (entry >> 1) == column
        if cfg.SWEEPS:
            ends = (at == last - 1).to(tl.int32) * 4 + (at == first).to(tl.int32) * 2
            entry = row * 8 + ends + (entry & 1)
        else:
            entry = row * 2 + (entry & 1)
        counted = tl.cumsum(live.to(tl.int32), 0)
        tl.store(turned + begin + counted - 1, entry, mask=live)
        begin += tl.sum(live.to(tl.int32), 0)
        start += cfg.LANES
    if pid == tl.num_programs(0) - 1:
        tl.store(offsets + pid + 1, begin)
        tl.store(narrow_offsets + pid + 1, begin.to(tl.int32))
        if cfg.SWEEPS:
            tl.store(turned + begin, 0)


@triton.jit
def join_kernel(joined, bounds, entries, row_offsets, sizes, cfg: tl.constexpr):
    """One program a tile of a unit.

    joined: int32, entries of gluon/merged_lists.py. A tile's begin where they would if no two
    consumers shared one. bounds: int64 [tiles of all units, 2], a tile's first entry and last
    entry + 1. sizes = (tiles of a unit, rows of a unit, columns, halvings, consumers a row).
    """
    num_tiles, num_rows = whole32(sizes, 0), whole32(sizes, 3)
    num_columns, halvings = whole32(sizes, 6), whole32(sizes, 9)
    parts = whole32(sizes, 12)
    pid = tl.program_id(0)
    unit, tile = pid // num_tiles, pid % num_tiles
    part = tile * cfg.CONSUMERS
    head, tail = _entries_of(row_offsets, unit, part // parts, num_rows)
    begin = head * parts + (tail - head) * (part % parts)
    end = begin
    start = num_columns * 0
    while start < num_columns:
        column = start + tl.arange(0, cfg.LANES)
        flags = column * 0
        for consumer in tl.static_range(cfg.CONSUMERS):
            row = (part + consumer) // parts + column * 0
            first, last = _entries_of(row_offsets, unit, row, num_rows)
            at = _lower_bound(entries, first, last, column * 2, halvings)
            entry = tl.load(entries + at, mask=at < last, other=-1)
            live = ((entry >> 1) == column) & (column < num_columns)
            flags += tl.where(live, 2 + (entry & 1), 0) << (2 * consumer)
        live = (flags > 0).to(tl.int32)
        place = joined + end + tl.cumsum(live, 0) - 1
        tl.store(place, (column << cfg.FLAG_BITS) + flags, mask=live > 0)
        end += tl.sum(live, 0)
        start += cfg.LANES
    tl.store(bounds + pid * 2, begin)
    tl.store(bounds + pid * 2 + 1, end)
