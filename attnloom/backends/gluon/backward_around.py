"""Before and after the main kernel of the backward, in portable Triton.

    prepare_kernel   row statistics, and zeros where dq will be added up, or where nobody writes it
    finish_kernel    dq from there to its tensor, scaled

Memory of dq: [lines, WIDTH] float32, of which the first USED columns are, TILE_M lines a tile, a
tile in the order in which the lanes of a warpgroup hold accumulators of wgmma, 2 x 2 elements (rows
r and r + 8, neighbouring columns) a lane, 8 columns after the others. Glossary:
backend/triton/backward.py and backward_shared.py.

OVERLAPS: the main kernel and finish_kernel start while the kernel before is ending, and wait for it
(griddepcontrol in PTX).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnloom.backends.triton.device_math import FAR, LOG2_E, whole, whole32
from attnloom.backends.triton.tiles import load_tile


@triton.jit(do_not_specialize=["rows", "shape", "strides"])
def prepare_kernel(out, dout, dlse, lse, stats, dq_sum, rows, shape, strides, cfg: tl.constexpr):
    """One tile of one head, the last program the spare one. shape = (Hq, Q_LEN, PITCH, B * Hq);
    strides of out, dout. stats: [2, lines], lse_log2 and delta. SWEEPS: dq_sum is dq, rows =
    (offsets of rows of the mask, batch step, head step, blocks of a head)."""
    if cfg.OVERLAPS:
        gdc_launch_dependents()
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
    # rows without keys have no gradients; nor have those past FAR, see delta_kernel
    dead = (natural == float("-inf")) | (tl.abs(natural) >= FAR)
    tl.store(stats + line, tl.where(dead, float("inf"), natural * LOG2_E))
    lines = (num_heads.to(tl.int64) * tiles + 1) * M
    tl.store(stats + lines + line, delta)
    if cfg.SWEEPS:
        _clear_dead(dq_sum, rows, (b, h, bh, row, q_len), cfg)
    else:
        start = dq_sum + pid.to(tl.int64) * (M * cfg.WIDTH)
        # as many columns at once as are a power of two
        WHOLE: tl.constexpr = cfg.WIDTH & -cfg.WIDTH
        CLEARED: tl.constexpr = cfg.COLUMNS if cfg.USED < cfg.WIDTH else WHOLE
        for c in tl.static_range(0, cfg.USED, CLEARED):
            zeros = tl.zeros([M * CLEARED], tl.float32)
            tl.store(start + M * c + tl.arange(0, M * CLEARED), zeros)


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
    """COLUMNS of one tile of one head, last tiles first: the cache may hold them still. dq:
    contiguous [B, Hq, Q_LEN, D]. shape as prepare_kernel's."""
    q_len, pitch = whole32(shape, 3), whole32(shape, 6)
    M: tl.constexpr = cfg.TILE_M
    C: tl.constexpr = cfg.COLUMNS
    PARTS: tl.constexpr = cfg.USED // C
    tiles = pitch // M
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, first = pid // PARTS, pid % PARTS * C
    bh, row = tile // tiles, (tile % tiles) * M
    if cfg.OVERLAPS:
        gdc_wait()
    start = dq_sum + (tile.to(tl.int64) * (M * cfg.WIDTH) + first * M)
    found = tl.load(start + tl.arange(0, M * C))
    found = (found * scale).to(dq.dtype.element_ty)
    # [C / 8, M / 16, row % 8, column % 8 / 2, row % 16 / 8, column % 2]
    found = found.reshape(C // 8, M // 16, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(M, C)
    r = tl.arange(0, M)[:, None]
    c = first + tl.arange(0, C)[None, :]
    inside = row + r < q_len
    if cfg.D < cfg.WIDTH:
        inside = inside & (c < cfg.D)
    tl.store(dq + (bh.to(tl.int64) * q_len + row) * cfg.D + (r * cfg.D + c), found, mask=inside)
