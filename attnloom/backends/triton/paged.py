"""Attention over a cache: sequences of their own lengths, keys and values perhaps in pages.

Glossary (more in forward.py and decode.py)
    length, count   keys and queries of a sequence, read from the page table at run time
    position        of a query in its sequence; row r is query r % QUERIES of head r // QUERIES
    page            number of a page of storage, or several where a tile spans them; of a row of the
                    batch where there are no pages
    tail            the key tile that the sequence ends in

A program takes TILE_M rows, QUERIES consecutive queries of HEADS query heads that share a key
head, and one of NUM_SPLITS shares of their live key tiles (flash-decoding, Dao et al. 2023; pages:
Kwon et al. 2023). Query tiles lie on a grid of positions, so that none crosses a block of the mask:
the lists of the mask of whole sequences are read at the row of the first position, and nothing is
rebuilt as sequences grow.

Rows past the length may hold anything. Tiles in front of the tail are full of keys and run without
a bound; the tail has its own loop of at most one step, which hides scores and clears values.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attnloom.backends.triton.decode import _load_queries, _store_rows
from attnloom.backends.triton.device_math import LN_2, real, whole, whole32
from attnloom.backends.triton.forward import (
    empty_state,
    exponent_scale,
    mask_context,
    modded_scores,
    score_context,
)
from attnloom.backends.triton.merge import row_offsets
from attnloom.backends.triton.tiles import load_tile


@triton.jit
def _pages_of(table, base, kv, length, cfg: tl.constexpr):
    """Pages of the tile at key kv that spans several, in order: scalars, which a loop carries in a
    register each, where a vector would have one for each row. Those past the length are 0: the
    table need not have them."""
    entries = table[2] + base + kv // cfg.PAGE
    pages = (tl.load(entries, mask=kv < length, other=0),)
    for i in tl.static_range(1, cfg.TILE_N // cfg.PAGE):
        inside = kv + i * cfg.PAGE < length
        pages = pages + (tl.load(entries + i, mask=inside, other=0),)  # noqa: RUF005
    return pages


@triton.jit
def _gathered_rows(pages, stride_p, stride_l, cfg: tl.constexpr):
    """[TILE_N] offsets of the rows of a tile that spans several pages, within a head.

    A thread knows the rows that it copies when it is compiled, so that a choice among scalars costs
    nothing. Pages are chosen, not offsets: a product with the stride is what says that rows are
    aligned."""
    row = tl.arange(0, cfg.TILE_N)
    page = tl.full([cfg.TILE_N], 0, tl.int32) + pages[0]
    for i in tl.static_range(1, cfg.TILE_N // cfg.PAGE):
        page = tl.where(row // cfg.PAGE == i, pages[i], page)
    in_page = row % cfg.PAGE
    if cfg.FAR:
        return page.to(tl.int64) * stride_p + in_page.to(tl.int64) * stride_l
    else:
        return page * tl.cast(stride_p, tl.int32) + in_page * tl.cast(stride_l, tl.int32)


@triton.jit
def _load_keys(
    src, at, page, kv, length, COL: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """[TILE_N, COLS] of keys or values. at = (h, stride of pages, of heads, of rows, rows in a
    page)."""
    N: tl.constexpr = cfg.TILE_N
    h, stride_p, stride_h, stride_l, rows = at
    if cfg.GATHER:
        if cfg.ALIGNED:
            UNIT: tl.constexpr = 128 // src.dtype.element_ty.primitive_bitwidth
            stride_p = (stride_p // UNIT) * UNIT
            stride_h = (stride_h // UNIT) * UNIT
            stride_l = (stride_l // UNIT) * UNIT
        offs_c = COL + tl.arange(0, COLS)[None, :]
        of_head = src + tl.cast(h, tl.int64) * stride_h
        ptr = of_head + (_gathered_rows(page, stride_p, stride_l, cfg)[:, None] + offs_c)
        if TAIL:
            mask = (kv + tl.arange(0, N) < length)[:, None] & (offs_c < WIDTH)
            tile = tl.load(ptr, mask=mask, other=0.0)
        elif COL + COLS > WIDTH:
            tile = tl.load(ptr, mask=offs_c < WIDTH, other=0.0)
        else:
            tile = tl.load(ptr)
    else:
        row = kv
        if cfg.PAGE > 0:
            row = kv % cfg.PAGE
        place = (page, h, stride_p, stride_h, stride_l, rows)
        tile = load_tile(src, place, row, COL, N, COLS, WIDTH, cfg)
        if TAIL:
            live = kv + tl.arange(0, N) < length
            tile = tl.where(live[:, None], tile, 0.0)
    return tile.to(cfg.OPERAND)


@triton.jit
def _scores(
    q, k_src, k_at, page, kv, length, partial, factor, score_ctx, mask_ctx, pos,
    TAIL: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """[TILE_M, TILE_N] of the scores of a key tile, after mods and masks."""
    D0: tl.constexpr = cfg.D0
    D01: tl.constexpr = cfg.D0 + cfg.D1
    k = _load_keys(k_src[0], k_at, page, kv, length, 0, D0, cfg.D, TAIL, cfg)
    s = tl.dot(q[0], k.T, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.D1 > 0:
        k = _load_keys(k_src[1], k_at, page, kv, length, D0, cfg.D1, cfg.D, TAIL, cfg)
        s = tl.dot(q[1], k.T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.D2 > 0:
        k = _load_keys(k_src[2], k_at, page, kv, length, D01, cfg.D2, cfg.D, TAIL, cfg)
        s = tl.dot(q[2], k.T, s, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    offs_n = kv + tl.arange(0, cfg.TILE_N)[None, :]
    s = modded_scores(s, factor, score_ctx, pos, offs_n, cfg)
    if cfg.HAS_MASK:  # noqa: SIM102 - one is decided when compiling, one when running
        if partial:
            args, head, row = mask_ctx
            live = cfg.MASK_BODY(args, head, row, pos[0], pos[1], pos[2], offs_n)
            s = tl.where(live, s, float("-inf"))
    if TAIL:
        s = tl.where(offs_n < length, s, float("-inf"))
    return s


@triton.jit
def _step(
    state, q, k_src, k_at, v_src, v_at, page, kv, length, partial, factor, score_ctx, mask_ctx,
    pos, TAIL: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """One key tile into the state (acc0..2, m_i, l_i) of the online softmax."""
    E0: tl.constexpr = cfg.E0
    E01: tl.constexpr = cfg.E0 + cfg.E1
    s = _scores(
        q, k_src, k_at, page, kv, length, partial, factor, score_ctx, mask_ctx, pos, TAIL, cfg
    )
    acc0, acc1, acc2, m_i, l_i = state
    m_new = tl.maximum(m_i, tl.max(s, 1))
    c = exponent_scale(factor, cfg)
    # a row without a key so far would give exp2(-inf + inf)
    m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - m_use) * c)
    l_i = l_i * alpha
    acc0 = acc0 * alpha[:, None]
    if cfg.E1 > 0:
        acc1 = acc1 * alpha[:, None]
    if cfg.E2 > 0:
        acc2 = acc2 * alpha[:, None]
    if cfg.NATURAL or cfg.HUGE:
        p = tl.exp2((s - m_use[:, None]) * c)
    else:
        p = tl.exp2(s * c - (m_use * c)[:, None])
    l_i += tl.sum(p, 1)
    p = p.to(cfg.OPERAND)
    v = _load_keys(v_src[0], v_at, page, kv, length, 0, E0, cfg.DV, TAIL, cfg)
    acc0 = tl.dot(p, v, acc0, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.E1 > 0:
        v = _load_keys(v_src[1], v_at, page, kv, length, E0, cfg.E1, cfg.DV, TAIL, cfg)
        acc1 = tl.dot(p, v, acc1, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    if cfg.E2 > 0:
        v = _load_keys(v_src[2], v_at, page, kv, length, E01, cfg.E2, cfg.DV, TAIL, cfg)
        acc2 = tl.dot(p, v, acc2, input_precision=cfg.PRECISION, out_dtype=cfg.ACC)
    return acc0, acc1, acc2, m_new, l_i


@triton.jit
def _listed(lists, unit, block, length, cfg: tl.constexpr):
    """Of a row of lists: (entries, key tiles in front of the tail, 1 if there is a tail, the first
    entry).

    lists = (row offsets, entries, ...), those of BlockLists."""
    KV_BLOCK: tl.constexpr = cfg.SUB * cfg.TILE_N
    row = unit + block
    first = tl.load(lists[0] + row)
    count = (tl.load(lists[0] + row + 1) - first).to(tl.int32)
    entries = lists[1] + first
    end_block = length // KV_BLOCK
    head = tl.load(entries, mask=count > 0, other=0)
    last = tl.load(entries + count - 1, mask=count > 0, other=-1) >> 1
    before = tl.load(entries + count - 2, mask=count > 1, other=-1) >> 1
    # How many entries lie in front of the block that the sequence ends in. Nearly always all or all
    # but one; a mask that looks past the end is searched.
    low = count - (last >= end_block).to(tl.int32)
    high = low
    if before >= end_block:
        low = 0
        high = count - 2
    while low < high:
        middle = (low + high) // 2
        beyond = (tl.load(entries + middle) >> 1) >= end_block
        low = tl.where(beyond, low, middle + 1)
        high = tl.where(beyond, middle, high)
    found = tl.load(entries + low, mask=low < count, other=-1) >> 1
    ends_here = found == end_block
    in_block = length - end_block * KV_BLOCK
    full = low * cfg.SUB + tl.where(ends_here, in_block // cfg.TILE_N, 0)
    tail = ends_here & (in_block % cfg.TILE_N != 0)
    return entries, full, tail.to(tl.int32), head


@triton.jit(
    do_not_specialize=["lists", "table", "score_args", "mask_args", "scale", "shape", "strides"]
)
def paged_kernel(
    q, k0, k1, k2, v0, v1, v2, out, lse, max_scores, partial_acc, partial_m, partial_l, lists,
    table, score_args, mask_args, scale, shape, strides, cfg: tl.constexpr,
):  # fmt: skip
    """shape = (Hq, GROUP, head chunks, splits, Q_LEN, capacity, query tiles, batch step of key,
    columns of pages, query blocks of the mask, their size, Hkv); strides as in forward.py. lists =
    (row offsets, entries, batch step, head step). table = (lengths, counts, pages [B, columns])."""
    if cfg.OVERLAPS:
        gdc_launch_dependents()
    k_src, v_src = (k0, k1, k2), (v0, v1, v2)
    heads, group = whole32(shape, 0), whole32(shape, 3)
    num_chunks, num_splits = whole32(shape, 6), whole32(shape, 9)
    q_len, num_tiles = whole32(shape, 12), whole32(shape, 18)
    pid = tl.program_id(0)
    # The first copies wait for these divisions, each some 20 instructions long.
    unit = pid
    split, chunk, tile = pid * 0, pid * 0, pid * 0
    if num_splits > 1:
        unit = pid // num_splits
        split = pid - unit * num_splits
    if num_chunks > 1:
        rest = unit // num_chunks
        chunk = unit - rest * num_chunks
        unit = rest
    if num_tiles > 1:
        rest = unit // num_tiles
        tile = unit - rest * num_tiles
        unit = rest
    kv_heads = whole32(shape, 33)
    b = unit // kv_heads
    h_kv = unit - b * kv_heads

    length = tl.minimum(tl.load(table[0] + b), whole32(shape, 15))
    count = q_len
    if cfg.HAS_COUNTS:
        count = tl.minimum(tl.load(table[1] + b), q_len)
    start = length - count  # below 0 where the first rows stand before the sequence, and are empty
    first_query = tile * cfg.QUERIES
    if cfg.HAS_LISTS:
        first_query -= start & (cfg.QUERIES - 1)  # a power of two
    rows = tl.arange(0, cfg.TILE_M)
    head = chunk * cfg.HEADS + rows // cfg.QUERIES
    query = first_query + rows % cfg.QUERIES
    written = (head < group) & (query >= 0) & (query < q_len)
    exists = written & (query < count) & (start + query >= 0)
    head = tl.minimum(head, group - 1)
    query = tl.minimum(tl.maximum(query, 0), q_len - 1)
    h = h_kv * group + head
    offsets = row_offsets(b, h, query, strides, 0)[:, None]
    q_tile = _load_queries(q, offsets, exists[:, None], cfg)
    factor = real(scale, 0, cfg.ACC)
    pos = (b, h[:, None], tl.maximum(start + query, 0)[:, None], 0, 0)
    score_ctx = score_context(score_args, b, pos[1], pos[2], cfg)
    mask_ctx = mask_context(mask_args, b, pos[1], pos[2], cfg)

    base = b * whole32(shape, 21)
    in_page = whole32(shape, 15)
    if cfg.PAGE > 0:
        base = b * whole32(shape, 24)
        in_page = cfg.PAGE
    k_at = (h_kv, whole(strides, 9), whole(strides, 12), whole(strides, 15), in_page)
    v_at = (h_kv, whole(strides, 18), whole(strides, 21), whole(strides, 24), in_page)

    if cfg.HAS_LISTS:
        block = tl.maximum(start + tl.maximum(first_query, 0), 0) // whole32(shape, 30)
        block = tl.minimum(block, whole32(shape, 27) - 1)
        lists_unit = b * whole32(lists, 2) + h_kv * whole32(lists, 5)
        entries, full, tail, first_entry = _listed(
            lists, lists_unit.to(tl.int64) * whole32(shape, 27), block, length, cfg
        )
    else:
        entries = table[0]
        full = length // cfg.TILE_N
        tail = (length % cfg.TILE_N != 0).to(tl.int32)
    total = full + tail
    if (first_query >= count) | (first_query + cfg.QUERIES <= tl.maximum(-start, 0)):
        total = 0
    begin = total * 0
    end = total
    if num_splits > 1:
        each = total // num_splits
        more = total - each * num_splits
        begin = each * split + tl.minimum(split, more)
        end = begin + each + (split < more).to(tl.int32)
    full = tl.minimum(full, end)

    state = empty_state(cfg.TILE_M, cfg)
    entry = 1
    kv = begin * cfg.TILE_N
    if cfg.HAS_LISTS:
        if cfg.SINGLE:
            entry = first_entry
        else:
            entry = tl.load(entries + begin // cfg.SUB, mask=begin < end, other=0)
        kv = ((entry >> 1) * cfg.SUB + begin % cfg.SUB) * cfg.TILE_N
    page = base
    if cfg.GATHER:
        page = _pages_of(table, base, kv, length, cfg)
    elif cfg.PAGE > 0:
        page = tl.load(table[2] + base + kv // cfg.PAGE, mask=kv < length, other=0)
    for t in tl.range(begin, full):
        # What the next step needs to know of its keys is loaded now: the copy that waits for an
        # address stalls every warp, and a copy whose address is loaded in the same step is issued
        # a stage late.
        here, at, partial = page, kv, (entry & 1) != 0
        following = tl.minimum(t + 1, end - 1)
        if cfg.HAS_LISTS:
            entry = tl.load(entries + following // cfg.SUB)
            kv = ((entry >> 1) * cfg.SUB + following % cfg.SUB) * cfg.TILE_N
        else:
            kv = following * cfg.TILE_N
        if cfg.GATHER:
            page = _pages_of(table, base, kv, length, cfg)
        elif cfg.PAGE > 0:
            page = tl.load(table[2] + base + kv // cfg.PAGE)
        state = _step(
            state, q_tile, k_src, k_at, v_src, v_at, here, at, length, partial, factor, score_ctx,
            mask_ctx, pos, False, cfg,
        )  # fmt: skip
    for t in tl.range(tl.maximum(full, begin), end, num_stages=1):
        if cfg.PAGE == 0:
            kv = t * cfg.TILE_N
            if cfg.HAS_LISTS:
                entry = tl.load(entries + t // cfg.SUB)
                kv = ((entry >> 1) * cfg.SUB + t % cfg.SUB) * cfg.TILE_N
        # over pages the step before has looked all of it up
        partial = (entry & 1) != 0
        state = _step(
            state, q_tile, k_src, k_at, v_src, v_at, page, kv, length, partial, factor, score_ctx,
            mask_ctx, pos, True, cfg,
        )  # fmt: skip

    acc0, acc1, acc2, m_i, l_i = state
    # rows of padding saw keys as well
    m_i = tl.where(exists, m_i, float("-inf"))
    l_i = tl.where(exists, l_i, 0.0)
    share = tl.where(exists, 1.0, 0.0)
    if cfg.SINGLE:
        share = share / tl.where(l_i == 0, 1.0, l_i)
        target = out
        offsets = row_offsets(b, h, query, strides, 27)[:, None]
        at = (tl.cast(b, tl.int64) * heads + h) * q_len + query
    else:
        target = partial_acc
        at = (unit.to(tl.int64) * num_splits + split) * (group * q_len) + head * q_len + query
        offsets = (at * cfg.DV)[:, None]
    keep, share = written[:, None], share[:, None]
    _store_rows(target, tl.where(share == 0, 0.0, acc0 * share), offsets, keep, 0, cfg.E0, cfg)
    if cfg.E1 > 0:
        acc1 = tl.where(share == 0, 0.0, acc1 * share)
        _store_rows(target, acc1, offsets, keep, cfg.E0, cfg.E1, cfg)
    if cfg.E2 > 0:
        acc2 = tl.where(share == 0, 0.0, acc2 * share)
        _store_rows(target, acc2, offsets, keep, cfg.E0 + cfg.E1, cfg.E2, cfg)
    if cfg.SINGLE:
        natural = m_i * (exponent_scale(factor, cfg) * LN_2)
        log_sum = tl.where(l_i == 0, float("-inf"), natural + tl.log(l_i))
        tl.store(lse + at, log_sum, mask=written)
        if cfg.WANT_MAX:
            tl.store(max_scores + at, natural, mask=written)
    else:
        tl.store(partial_m + at, m_i, mask=written)
        tl.store(partial_l + at, l_i, mask=written)
