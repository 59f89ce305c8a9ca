"""Elements that each score has to itself, moved in pieces of 16 bytes along the keys.

A thread of a product's result holds two neighbouring elements of a row of a few keys, or, where
scores are transposed, none: read as it lies there, a table [Q_LEN, KV_LEN] comes 4 or 2 bytes at a
time. Here a thread takes whole pieces, and they change threads on the way to where scores are:

    not LINES   a warp takes the rows of its scores, 32 or 64 bytes of each side by side, and no
                other warp has to wait for it
    LINES       neighbours take as many keys as a tile has, 128 bytes or more; pieces go through a
                tile of shared memory, and the four warps wait for each other

`streamed`: what no other head reads again is the first to leave the caches, before keys, values and
sums of dq, which are read again.

Generated fragments call these (emit.py, emit_grad.py). Scores are [64, N], [queries, keys] with
QX = 1 and [keys, queries] with QX = 0, rows 16 w ... 16 w + 15 in warp w.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE_BYTES = 16
_ROWS = 64
_LANE_BITS = 5
_LINE_BYTES = 128  # that all banks of shared memory hold


@gluon.constexpr_function
def _powers(first, end):
    """Powers of two from the first to below the end."""
    found = [first]
    while found[-1] * 2 < end:
        found.append(found[-1] * 2)
    return found if first < end else []


@gluon.constexpr_function
def piece_layout(N, QX, item_bytes, LINES):
    """The layout of tiles of elements of item_bytes, each thread with whole pieces of a row."""
    unit = PIECE_BYTES // item_bytes
    num_keys, num_queries = (N, _ROWS) if QX == 1 else (_ROWS, N)
    # of a bit of a number of registers, lanes or warps: what it is worth in (keys, queries)
    keys = [(k, 0) for k in _powers(unit, num_keys)]
    queries = [(0, q) for q in _powers(1, num_queries)]
    if LINES:
        lanes = (keys + queries)[:_LANE_BITS]
        warps = [bit for bit in queries if bit not in lanes][:2]
    elif QX == 1:
        lanes = keys[:2] + queries[:3]
        warps = [(0, 16), (0, 32)]
    else:
        own = [(k, 0) for k in _powers(unit, 16)]
        lanes = (own + queries)[:_LANE_BITS]
        warps = [(16, 0), (32, 0)]
    registers = [(k, 0) for k in _powers(1, unit)]
    registers += [bit for bit in keys + queries if bit not in lanes and bit not in warps]
    bases = [[[q, k] if QX == 1 else [k, q] for k, q in bits] for bits in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(*bases, [], [_ROWS, N])


@gluon.constexpr_function
def _tile_layout(N, QX, item_bytes):
    """Of a tile in shared memory: rows of pieces along the keys, turned so that neither pieces
    nor what a product's threads hold meet in a bank."""
    unit = PIECE_BYTES // item_bytes
    num_keys = N if QX == 1 else _ROWS
    rows_a_line = max(1, _LINE_BYTES // (num_keys * item_bytes))
    order = [1, 0] if QX == 1 else [0, 1]
    return gl.SwizzledSharedLayout(unit, rows_a_line, min(8, num_keys // unit), order)


@gluon.jit
def positions(q, kv, N: gl.constexpr, QX: gl.constexpr, ITEM_BYTES: gl.constexpr,
              LINES: gl.constexpr):  # fmt: skip
    """Queries and keys of a tile's pieces, from the first ones, as [64, 1] and [1, N] or the other
    way round."""
    LAYOUT: gl.constexpr = piece_layout(N, QX, ITEM_BYTES, LINES)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    if QX == 1:
        return q + rows, kv + columns
    else:
        return q + columns, kv + rows


@gluon.jit
def spread(pieces, score, QX: gl.constexpr, LINES: gl.constexpr):
    """The elements where their scores are; truth values as 8-bit integers if LINES."""
    LAYOUT: gl.constexpr = score.type.layout
    return _moved(pieces, LAYOUT, QX, LINES)


@gluon.jit
def gathered(value, QX: gl.constexpr, dtype: gl.constexpr, LINES: gl.constexpr):
    """Values where scores are, as elements of a type in pieces."""
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = piece_layout(value.shape[1], QX, BYTES, LINES)
    return _moved(value.to(dtype), LAYOUT, QX, LINES)


@gluon.jit
def _moved(value, LAYOUT: gl.constexpr, QX: gl.constexpr, LINES: gl.constexpr):
    if not LINES:
        return gl.convert_layout(value, LAYOUT)
    else:
        if value.dtype == gl.int1:
            value = value.to(gl.int8)
        BYTES: gl.constexpr = value.dtype.primitive_bitwidth // 8
        TILE: gl.constexpr = _tile_layout(value.shape[1], QX, BYTES)
        return gl.allocate_shared_memory(value.dtype, value.shape, TILE, value).load(LAYOUT)
