"""Merging the splits of rows: partial results of decode.py and paged.py into outputs.

By a kernel of its own, a program a row, or in the first kernel (FUSED), by the program of a key
head's row chunk that is done last. Splits are merged in their order, whichever was last: results
repeat bit for bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attnloom.backends.triton.device_math import LN_2, real, whole, whole32
from attnloom.backends.triton.forward import exponent_scale


@triton.jit
def row_offsets(b, h, query, strides, FIRST: tl.constexpr):
    """Offsets of rows in a [B, Hq, Q_LEN, *] tensor whose packed strides start at FIRST."""
    offset = tl.cast(b, tl.int64) * whole(strides, FIRST)
    offset += h.to(tl.int64) * whole(strides, FIRST + 3)
    return offset + query.to(tl.int64) * whole(strides, FIRST + 6)


@triton.jit
def _merge_rows(partials, outputs, unit, rows, scale, shape, strides, cfg: tl.constexpr):
    """Merge and store rows, [ROWS], of a key head; those past its last are left out.

    Partial results may have been written by other processors: they are read from the cache that all
    of them share."""
    partial_acc, partial_m, partial_l = partials
    out, lse, max_scores = outputs
    ROWS: tl.constexpr = rows.shape[0]
    heads, group = whole32(shape, 0), whole32(shape, 3)
    num_splits, q_len = whole32(shape, 9), whole32(shape, 12)
    num_rows = group * q_len
    inside = rows < num_rows
    b = unit // (heads // group)
    h = (unit % (heads // group)) * group + rows // q_len
    query = rows % q_len
    c = exponent_scale(real(scale, 0, cfg.ACC), cfg)

    offs_c = tl.arange(0, cfg.WIDTH)
    m_i = tl.full([ROWS], float("-inf"), cfg.ACC)
    l_i = tl.zeros([ROWS], cfg.ACC)
    acc = tl.zeros([ROWS, cfg.WIDTH], cfg.ACC)
    for start in tl.range(0, num_splits, cfg.SPLITS, num_stages=1):
        splits = start + tl.arange(0, cfg.SPLITS)
        live = (splits < num_splits)[:, None] & inside[None, :]
        # [SPLITS, ROWS]
        at = (unit.to(tl.int64) * num_splits + splits)[:, None] * num_rows + rows[None, :]
        m = tl.load(partial_m + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        share = tl.load(partial_l + at, mask=live, other=0.0, cache_modifier=".cg")
        # [SPLITS, ROWS, WIDTH]
        a = tl.load(
            partial_acc + at[:, :, None] * cfg.DV + offs_c[None, None, :],
            mask=live[:, :, None] & (offs_c < cfg.DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m_i, tl.max(m, 0))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((m - m_use[None, :]) * c)
        alpha = tl.exp2((m_i - m_use) * c)
        l_i = l_i * alpha + tl.sum(share * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(a * weight[:, :, None], 0)
        m_i = m_new

    value = acc * (1.0 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    offset = row_offsets(b, h, query, strides, 27)[:, None]
    mask = inside[:, None] & (offs_c < cfg.DV)[None, :]
    tl.store(out + offset + offs_c[None, :], value.to(out.dtype.element_ty), mask=mask)
    natural = m_i * (c * LN_2)
    at = (tl.cast(b, tl.int64) * heads + h) * q_len + query
    log_sum = tl.where(l_i == 0, float("-inf"), natural + tl.log(l_i))
    tl.store(lse + at, log_sum, mask=inside)
    if cfg.WANT_MAX:
        tl.store(max_scores + at, natural, mask=inside)


@triton.jit
def merge_if_last(
    partials, outputs, finished, unit, chunk, scale, shape, strides, cfg: tl.constexpr
):  # fmt: skip
    """Merge the rows of a chunk if all other splits have been written.

    finished: a counter for each chunk. Its addition releases what all threads of this program have
    stored, which the barrier puts in front of it, and acquires what others had."""
    num_chunks, num_splits = whole32(shape, 6), whole32(shape, 9)
    num_rows = whole32(shape, 3) * whole32(shape, 12)
    place = finished + unit * num_chunks + chunk
    tl.debug_barrier()
    before = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu")
    if before == num_splits - 1:
        tl.store(place, 0)
        first = chunk * cfg.TILE_M
        last = tl.minimum(first + cfg.TILE_M, num_rows)
        for row in tl.range(first, last, cfg.ROWS, num_stages=1):
            rows = row + tl.arange(0, cfg.ROWS)
            _merge_rows(partials, outputs, unit, rows, scale, shape, strides, cfg)


@triton.jit(do_not_specialize=["scale", "shape", "strides"])
def combine_kernel(
    partial_acc, partial_m, partial_l, out, lse, max_scores, scale, shape, strides,
    cfg: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row; arguments as in decode_kernel, cfg a MergeConfig."""
    if cfg.OVERLAPS:
        gdc_wait()
    heads, group = whole32(shape, 0), whole32(shape, 3)
    num_splits, q_len = whole32(shape, 9), whole32(shape, 12)
    num_rows = group * q_len
    pid = tl.program_id(0)
    unit = pid // num_rows
    row = pid % num_rows
    b = unit // (heads // group)
    h = (unit % (heads // group)) * group + row // q_len
    query = row % q_len
    c = exponent_scale(real(scale, 0, cfg.ACC), cfg)

    offs_c = tl.arange(0, cfg.WIDTH)
    m_i = tl.full([], float("-inf"), cfg.ACC)
    l_i = tl.full([], 0.0, cfg.ACC)
    acc = tl.zeros([cfg.WIDTH], cfg.ACC)
    for start in tl.range(0, num_splits, cfg.SPLITS):
        splits = start + tl.arange(0, cfg.SPLITS)
        live = splits < num_splits
        at = (unit.to(tl.int64) * num_splits + splits) * num_rows + row
        m = tl.load(partial_m + at, mask=live, other=float("-inf"))
        share = tl.load(partial_l + at, mask=live, other=0.0)
        a = tl.load(
            partial_acc + at[:, None] * cfg.DV + offs_c[None, :],
            mask=live[:, None] & (offs_c < cfg.DV)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m_i, tl.max(m, 0))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2((m - m_use) * c)
        alpha = tl.exp2((m_i - m_use) * c)
        l_i = l_i * alpha + tl.sum(share * weight, 0)
        acc = acc * alpha + tl.sum(a * weight[:, None], 0)
        m_i = m_new

    value = acc * (1.0 / tl.where(l_i == 0, 1.0, l_i))
    offset = row_offsets(b, h, query, strides, 27)
    tl.store(out + offset + offs_c, value.to(out.dtype.element_ty), mask=offs_c < cfg.DV)
    natural = m_i * (c * LN_2)
    at = (tl.cast(b, tl.int64) * heads + h) * q_len + query
    tl.store(lse + at, tl.where(l_i == 0, float("-inf"), natural + tl.log(l_i)))
    if cfg.WANT_MAX:
        tl.store(max_scores + at, natural)
