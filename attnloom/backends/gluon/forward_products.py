"""The products of a step of the forward, q . k^T and p . v, and where their operands lie.

Nothing here waits but `finished`. Glossary: forward_shared.py, forward_sm90.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnloom.backends.gluon.forward_shared import PANEL
from attnloom.backends.gluon.forward_strips import (
    add_by_strip,
    both_waited,
    scores_by_strip,
    waited,
)
from attnloom.backends.gluon.forward_wide import add_wide
from attnloom.backends.gluon.rings import key_panel, slot_of


@gluon.jit
def take_queries(mem, at, L: gl.constexpr, cfg: gl.constexpr):
    """(where the first panel of a tile lies, the first Q_KEPT panels in registers; REST: the two
    parts of the tile that are multiplied)."""
    KEPT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    if cfg.REST > 0 and cfg.Q_KEPT > 0:
        tile = mem.q.index(at)
        left = tile.slice(0, PANEL, 1).load(KEPT)
        return at, (left, tile.slice(PANEL, cfg.REST, 1).load(KEPT))
    elif cfg.Q_KEPT == 3:
        left = mem.q.index(at).load(KEPT)
        middle = mem.q.index(at + 1).load(KEPT)
        return at, (left, middle, mem.q.index(at + 2).load(KEPT))
    elif cfg.Q_KEPT == 1:
        return at, (mem.q.index(at).load(KEPT),)
    else:
        return at, 0


@gluon.jit
def _panel(q, mem, i: gl.constexpr, cfg: gl.constexpr):
    """Panel i of the queries, from where it is multiplied."""
    if i < cfg.Q_KEPT:
        return q[1][i]
    else:
        return mem.q.index(q[0] + i)


@gluon.jit
def _part(q, mem, i: gl.constexpr, cfg: gl.constexpr):
    """The same of the first panel and the REST."""
    if cfg.Q_KEPT > 0:
        return q[1][i]
    else:
        return mem.q.index(q[0]).slice(i * PANEL, cfg.REST if i > 0 else PANEL, 1)


@gluon.jit
def scores(q, mem, n, L: gl.constexpr, cfg: gl.constexpr):
    """q . k^T of step n, PANELS products in flight, or two if REST. q: see `take_queries`."""
    if cfg.STRIPS:
        q_at = mem.queries_at + q[0] * (cfg.ROWS * cfg.D * 2)
        k_at = mem.keys_at + slot_of(n, cfg) * (cfg.TILE_N * cfg.D * 2 * cfg.PANELS)
        return scores_by_strip(q_at, k_at, L, cfg)
    elif cfg.REST > 0:
        zeros = gl.zeros([cfg.ROWS, cfg.TILE_N], gl.float32, L)
        whole = mem.k.index(key_panel(n, 0, cfg))
        k = whole.slice(0, PANEL, 1).permute((1, 0))
        s = warpgroup_mma(_part(q, mem, 0, cfg), k, zeros, use_acc=False, is_async=True)
        k = whole.slice(PANEL, cfg.REST, 1).permute((1, 0))
        return warpgroup_mma(_part(q, mem, 1, cfg), k, s, is_async=True)
    else:
        zeros = gl.zeros([cfg.ROWS, cfg.TILE_N], gl.float32, L)
        k = mem.k.index(key_panel(n, 0, cfg)).permute((1, 0))
        s = warpgroup_mma(_panel(q, mem, 0, cfg), k, zeros, use_acc=False, is_async=True)
        for i in gl.static_range(1, cfg.PANELS):
            k = mem.k.index(key_panel(n, i, cfg)).permute((1, 0))
            s = warpgroup_mma(_panel(q, mem, i, cfg), k, s, is_async=True)
        return s


@gluon.jit
def add_output(p, mem, values_at, slot, acc, cfg: gl.constexpr):
    """acc + p . v of a step, PANELS products in flight, or one if WIDE. values_at: address of v."""
    if cfg.STRIPS:
        BYTES: gl.constexpr = cfg.PANELS * cfg.TILE_N * cfg.DV * 2
        return add_by_strip(p, values_at + slot * BYTES, acc, cfg)
    elif cfg.WIDE:
        BYTES: gl.constexpr = cfg.PANELS * cfg.TILE_N * cfg.DV * 2
        return add_wide(p, values_at + slot * BYTES, acc, cfg.TILE_N, cfg.PART)
    elif cfg.PANELS == 3:
        left, middle, right = acc
        left = warpgroup_mma(p, mem.v.index(slot * 3), left, is_async=True)
        middle = warpgroup_mma(p, mem.v.index(slot * 3 + 1), middle, is_async=True)
        right = warpgroup_mma(p, mem.v.index(slot * 3 + 2), right, is_async=True)
        return left, middle, right
    else:
        return warpgroup_mma(p, mem.v.index(slot), acc, is_async=True)


@gluon.jit
def arrived(PENDING: gl.constexpr, s, cfg: gl.constexpr):
    """Scores, once at most so many products are in flight."""
    if cfg.STRIPS:
        return waited(PENDING, s)
    else:
        return warpgroup_mma_wait(PENDING, [s])


@gluon.jit
def finished(acc, p, cfg: gl.constexpr):
    """The output, and p, once all products are done."""
    if cfg.STRIPS:
        return both_waited(acc, p)
    elif cfg.PARTS == 3:
        left, middle, right, p = warpgroup_mma_wait(0, [acc[0], acc[1], acc[2], p])
        return (left, middle, right), p
    else:
        acc, p = warpgroup_mma_wait(0, [acc, p])
        return acc, p
