"""Loads and stores of one [ROWS, COLS] tile of a [B, H, L, D] tensor, by TMA or by pointers.

A head dimension that is no power of two is covered by up to three chunks (96 = 64 + 32), each a
tile of its own, so that padded lanes are avoided where possible.

at = (b, h, stride_b, stride_h, stride_l, length): which head, and how its rows lie. The last
dimension has stride 1; a tile of rows spans less than 2**31 elements (`arguments.unit_stride`).
ALIGNED says that rows start at multiples of 16 bytes, which widens the accesses.
"""

import triton
import triton.language as tl


@triton.jit
def _pointers(
    base, at, row, COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr
):
    b, h, stride_b, stride_h, stride_l, length = at
    if ALIGNED:
        # said by arithmetic: hints on scalars (tl.multiple_of) are lost when equal scalars are
        # merged
        UNIT: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
        stride_b = (stride_b // UNIT) * UNIT
        stride_h = (stride_h // UNIT) * UNIT
        stride_l = (stride_l // UNIT) * UNIT
    # A scalar of 64 bits to where the tile starts, offsets of 32 bits inside it: a tile of 64-bit
    # pointers takes two registers an element and spills.
    start = base + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    start += tl.cast(row, tl.int64) * stride_l
    offs_r = tl.arange(0, ROWS)[:, None]
    offs_c = COL + tl.arange(0, COLS)[None, :]
    step = tl.cast(stride_l, tl.int32)
    return start + (offs_r * step + offs_c), row + offs_r < length, offs_c


@triton.jit
def load_tile(
    src, at, row, COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + ROWS, columns COL .. COL + COLS; zero outside the tensor."""
    if cfg.USE_TMA:
        return src.load([at[0], at[1], row, COL]).reshape(ROWS, COLS)
    else:
        ptr, mask, offs_c = _pointers(src, at, row, COL, ROWS, COLS, cfg.ALIGNED)
        if COL + COLS > WIDTH:
            mask = mask & (offs_c < WIDTH)
        return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def store_tile(
    dst, value, at, row, COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    ptr, mask, offs_c = _pointers(dst, at, row, COL, ROWS, COLS, ALIGNED)
    if COL + COLS > WIDTH:
        mask = mask & (offs_c < WIDTH)
    tl.store(ptr, value.to(dst.dtype.element_ty), mask=mask)
