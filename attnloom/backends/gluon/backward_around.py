"""Before and after the main kernel of the backward, in portable Triton.

    prepare_kernel   row statistics, and zeros where dq will be added up, or where nobody writes it
    finish_kernel    dq from there to its tensor, scaled

Memory of dq: [lines, WIDTH] float32, TILE_M lines a tile, a tile in the order in which the lanes of
a warpgroup hold accumulators of wgmma, 2 x 2 elements (rows r and r + 8, neighbouring columns) a
lane. Glossary: backend/triton/backward.py and backward_shared.py.
"""

import triton
import triton.language as tl

from attnloom.backends.triton.device_math import LOG2_E, whole, whole32
from attnloom.backends.triton.tiles import load_tile


@triton.jit(do_not_specialize=["rows", "shape", "strides"])
def prepare_kernel(out, dout, dlse, lse, stats, dq_sum, rows, shape, strides, cfg: tl.constexpr):
    """One tile of one head, the last program the spare one. shape = (Hq, Q_LEN, PITCH, B * Hq);
    strides of out, dout. stats: [2, lines], lse_log2 and delta. SWEEPS: dq_sum is dq, rows =
    (offsets of rows of the mask, batch step, head step, blocks of a head)."""
    heads, q_len, pitch = whole32(shape, 0), whole32(shape, 3), whole32(shape, 6)
    num_heads = whole32(shape, 9)
    M: tl.constexpr = cfg.TILE_M
    tiles = pitch // M
    pid = tl.program_id(0)
    # the spare tile comes after all heads: its rows are past Q_LEN of the last one
    bh = tl.minimum(pid // tiles, num_heads - 1)
    row = (pid - bh * tiles) * M
    b, h = bh // heads, bh % heads
    out_at = (b, h, whole(strides, 0), whole(strides, 3), whole(strides, 6), q_len)
    dout_at = (b, h, whole(strides, 9), whole(strides, 12), whole(strides, 15), q_len)
    products = tl.zeros([M, cfg.CHUNK], tl.float32)
    for c in tl.static_range(0, cfg.DV, cfg.CHUNK):
        o = load_tile(out, out_at, row, c, M, cfg.CHUNK, cfg.DV, cfg)
        g = load_tile(dout, dout_at, row, c, M, cfg.CHUNK, cfg.DV, cfg)
        products += o.to(tl.float32) * g.to(tl.float32)
    delta = tl.sum(products, 1)
    offs = row + tl.arange(0, M)
    live = offs < q_len
    at = bh.to(tl.int64) * q_len + offs
    if cfg.HAS_DLSE:
        delta -= tl.load(dlse + at, mask=live, other=0.0)
    natural = tl.load(lse + at, mask=live, other=float("-inf"))
    line = pid.to(tl.int64) * M + tl.arange(0, M)
    tl.store(stats + line, tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E))
    lines = (num_heads.to(tl.int64) * tiles + 1) * M
    tl.store(stats + lines + line, delta)
    if cfg.SWEEPS:
        _clear_dead(dq_sum, rows, (b, h, bh, row, q_len), cfg)
    else:
        start = dq_sum + pid.to(tl.int64) * (M * cfg.WIDTH)
        tl.store(start + tl.arange(0, M * cfg.WIDTH), tl.zeros([M * cfg.WIDTH], tl.float32))


@triton.jit
def _clear_dead(dq, rows, place, cfg: tl.constexpr):
    """Zeros for queries of a block that no key tile visits. dq: contiguous."""
    b, h, bh, row, q_len = place
    block = row // (cfg.TILE_M * cfg.PER_BLOCK)
    unit = b * whole32(rows, 1) + h * whole32(rows, 4)
    offsets = rows[0] + unit * whole32(rows, 7) + block
    if tl.load(offsets) == tl.load(offsets + 1):
        r = tl.arange(0, cfg.TILE_M)[:, None]
        c = tl.arange(0, cfg.WIDTH)[None, :]
        start = dq + (bh.to(tl.int64) * q_len + row) * cfg.D
        zeros = tl.zeros([cfg.TILE_M, cfg.WIDTH], dq.dtype.element_ty)
        tl.store(start + (r * cfg.D + c), zeros, mask=(row + r < q_len) & (c < cfg.D))


@triton.jit(do_not_specialize=["shape"])
def finish_kernel(dq_sum, dq, scale, shape, cfg: tl.constexpr):
    """One tile of one head. dq: contiguous [B, Hq, Q_LEN, D]. shape as prepare_kernel's."""
    q_len, pitch = whole32(shape, 3), whole32(shape, 6)
    M: tl.constexpr = cfg.TILE_M
    tiles = pitch // M
    pid = tl.program_id(0)
    bh, row = pid // tiles, (pid % tiles) * M
    r = tl.arange(0, M)[:, None]
    start = dq + (bh.to(tl.int64) * q_len + row) * cfg.D
    for first in tl.static_range(0, cfg.WIDTH, cfg.COLUMNS):
        c = first + tl.arange(0, cfg.COLUMNS)[None, :]
        lane = (r % 8) * 4 + (c % 8) // 2
        place = ((c // 8) * 4 + r // 16) * 128 + lane * 4 + (r % 16) // 8 * 2 + c % 2
        found = tl.load(dq_sum + pid.to(tl.int64) * (M * cfg.WIDTH) + place)
        found *= scale
        inside = row + r < q_len
        if cfg.D < cfg.WIDTH:
            inside = inside & (c < cfg.D)
        tl.store(start + (r * cfg.D + c), found.to(dq.dtype.element_ty), mask=inside)
