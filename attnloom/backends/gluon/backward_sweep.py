"""Programs of the backward that have all keys of a head, tile after tile, and keep its dq to
themselves; SWEEPS.

Where a query has keys in a few neighbouring tiles, packed documents say, sums of dq go no further
than from a tile to the next ones: a program adds to what it left itself, each thread to its own
numbers, in memory of so many rows that it stays in the second-level cache. The first tile of a
block of queries finds nothing, and the last one rounds. Nobody clears memory before, nobody goes
over it after, and dq is the same bits in each launch.

    entry    of the lists here: block * 8 + 4 for a block's last keys + 2 for its first + partial
    line     row of dq, of all heads', * 4 + LAST + FIRST
    window   rows of a program's memory, a power of two: a row's place is what is left of it

Glossary: backward_shared.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST = gl.constexpr(1)
LAST = gl.constexpr(2)


@gluon.jit
def line_of(first_row, row, q_len, entry):
    """The line of a step. Rows past Q_LEN are nobody's: they are left as if more came."""
    ends = (entry >> 1) & 3
    ends = gl.where(row < q_len, ends, FIRST)
    return (first_row + row) * 4 + ends


@gluon.jit
def sums_so_far(dq_to, places, line, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """dq over the keys before a step's; zeros where there are none, and no step (line -1)."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    sums = gl.zeros([cfg.TILE_M, WIDTH], gl.float32, L)
    if (line & FIRST) == 0:
        start = _place_of(dq_to, line, cfg)
        sums = gl.inline_asm_elementwise(
            "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l,l,l,l",
            [start + places],
            dtype=gl.float32,
            is_pure=False,
            pack=4,
        )
    return sums


@gluon.jit
def leave_dq(dq_to, places, line, dq, first, cfg: gl.constexpr):
    """dq of a step to the next tile's, or to where it belongs. first: of its columns."""
    if (line & LAST) != 0:
        _round(dq_to, line, dq, first, cfg)
    else:
        start = _place_of(dq_to, line, cfg)
        gl.inline_asm_elementwise(
            "st.global.cg.v4.f32 [$8], {$4, $5, $6, $7};"
            "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
            "=r,=r,=r,=r,f,f,f,f,l,l,l,l",
            [dq, start + places],
            dtype=gl.int32,
            is_pure=False,
            pack=4,
        )


@gluon.jit
def _place_of(dq_to, line, cfg: gl.constexpr):
    """Where the memory of a step's sums starts."""
    sums, _, window, _, _ = dq_to
    row = gl.program_id(0) * (window + cfg.TILE_M) + ((line >> 2) & (window - 1))
    return (sums + row.to(gl.int64) * cfg.D).to(gl.int64)


@gluon.jit
def _round(dq_to, line, dq, first, cfg: gl.constexpr):
    """dq of a step to its tensor. A lane has pairs of two rows and every eighth column; two lanes
    exchange theirs, so that both have four columns in a row, and 32 bytes are written together."""
    WIDTH: gl.constexpr = dq.shape[1]
    L: gl.constexpr = dq.type.layout
    _, to, _, q_len, scale = dq_to
    row = line >> 2
    r = gl.arange(0, cfg.TILE_M, gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :]
    # what lanes and what registers add, apart: one address and constants
    lane = (c % 8) // 2
    column = (lane % 2) * 8 + (lane // 2) * 4
    upper = r // 16 * 16 + r % 8
    place = (upper * cfg.DQ_COLUMNS + column + c // 16 * 16).to(gl.int64) * 2
    start = (to + (row.to(gl.int64) * cfg.DQ_COLUMNS + first)).to(gl.int64)
    inside = gl.full([cfg.TILE_M, WIDTH], 1, gl.int32, L)
    if cfg.DQ_RAGGED:
        there = (r < q_len - row % q_len) & (column + c // 16 * 16 + first < cfg.DQ_COLUMNS)
        inside = there.to(gl.int32)
    lower = gl.full([cfg.TILE_M, WIDTH], 16 * cfg.DQ_COLUMNS, gl.int64, L)
    gl.inline_asm_elementwise(
        cfg.DQ_STORE,
        "=r,=r,=r,=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,r",
        [dq * scale, start + place, lower, inside],
        dtype=gl.int32,
        is_pure=False,
        pack=8,
    )
