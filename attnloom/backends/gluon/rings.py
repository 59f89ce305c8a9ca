"""Rings of slots in shared memory, as both phases fill and empty them, and scalars left there.

The n-th step or tile of a warp takes slot n & (STAGES - 1); the phase of its barriers is the parity
of how often that slot was used before. Whoever fills a slot waits for its barrier "empty" in the
phase before, whoever empties it for "full" in the phase itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon import builtins as bi


@gluon.jit
def slot_of(n, cfg: gl.constexpr):
    return n & (cfg.STAGES - 1)


@gluon.jit
def phase_of(n, cfg: gl.constexpr):
    return (n >> cfg.LOG_STAGES) & 1


@gluon.jit
def put(dst, value):
    """A scalar to shared memory, by a warp of its own."""
    dst.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def get(src):
    """A scalar from shared memory."""
    return gl.sum(src.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def box(tile, ROWS: gl.constexpr, COLS: gl.constexpr, cfg: gl.constexpr):
    """A tile as the descriptors of [B, H, L, D] tensors see it."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    return bi.reinterpret(tile, cfg.OPERAND, [1, 1, ROWS, COLS], LAYOUT)
