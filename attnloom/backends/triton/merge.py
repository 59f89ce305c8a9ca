"""Merging the splits of rows: partial results of decode.py and paged.py into outputs, in the order
of splits, a program a row."""

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
