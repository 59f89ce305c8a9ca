"""Elements that each score has to itself, moved in pieces of 16 bytes along the keys.

A thread of a product's result holds two neighbouring elements of a row of a few keys, or, where
scores are transposed, none: read as it lies there, a table [Q_LEN, KV_LEN] comes 4 or 2 bytes at a
time. Here a thread takes whole pieces, 32 or 64 bytes of a row between neighbours, and a
conversion within its warp brings the elements to where scores are; no barrier is involved.

Generated fragments call these (emit.py, emit_grad.py). Scores are [64, N], [queries, keys] with
QX = 1 and [keys, queries] with QX = 0, rows 16 w ... 16 w + 15 in warp w.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE_BYTES = 16
_ROWS = 64
_LANE_BITS = 5
_WARPS = [[16, 0], [32, 0]]  # which rows, bit by bit


@gluon.constexpr_function
def _powers(first: int, end: int) -> list[int]:
    """Powers of two from the first to below the end."""
    found = [first]
    while found[-1] * 2 < end:
        found.append(found[-1] * 2)
    return found if first < end else []


@gluon.constexpr_function
def piece_layout(N, QX, item_bytes):
    """The layout of tiles of elements of item_bytes, each thread with whole pieces of a row."""
    unit = PIECE_BYTES // item_bytes
    inside = [1 << i for i in range(unit.bit_length() - 1)]
    if QX == 1:
        registers = [[0, k] for k in inside]
        lanes = [[0, unit], [0, 2 * unit], [1, 0], [2, 0], [4, 0]]
        registers += [[0, k] for k in _powers(4 * unit, N)] + [[8, 0]]
    else:
        registers = [[k, 0] for k in inside]
        lanes = [[k, 0] for k in _powers(unit, 16)]
        queries = _powers(1, N)
        left = _LANE_BITS - len(lanes)
        lanes += [[0, q] for q in queries[:left]]
        registers += [[0, q] for q in queries[left:]]
    return gl.DistributedLinearLayout(registers, lanes, _WARPS, [], [_ROWS, N])


@gluon.jit
def positions(q, kv, N: gl.constexpr, QX: gl.constexpr, ITEM_BYTES: gl.constexpr):
    """Queries and keys of a tile's pieces, from the first ones, as [64, 1] and [1, N] or the other
    way round."""
    LAYOUT: gl.constexpr = piece_layout(N, QX, ITEM_BYTES)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    if QX == 1:
        return q + rows, kv + columns
    else:
        return q + columns, kv + rows


@gluon.jit
def spread(pieces, score):
    """The elements where their scores are."""
    return gl.convert_layout(pieces, score.type.layout)


@gluon.jit
def gathered(value, QX: gl.constexpr, dtype: gl.constexpr):
    """Values where scores are, as elements of a type in pieces."""
    LAYOUT: gl.constexpr = piece_layout(value.shape[1], QX, dtype.primitive_bitwidth // 8)
    return gl.convert_layout(value.to(dtype), LAYOUT)
