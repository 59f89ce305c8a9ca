"""Products of a step of the backward that are started ahead of their use, and dscore on its way to
dq's. Glossary: backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from attnloom.backends.gluon.backward_shared import HALF
from attnloom.backends.gluon.rings import slot_of


@gluon.jit
def _product(a, b, init, L: gl.constexpr, cfg: gl.constexpr):
    """a . b^T, started. FOLD: onto a row of column values."""
    if cfg.FOLD:
        # -0.0 + x is x, so that this is a broadcast
        acc = gl.full([HALF, cfg.TILE_M], -0.0, gl.float32, L) + init[None, :]
        return warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    else:
        acc = gl.zeros([HALF, cfg.TILE_M], gl.float32, L)
        return warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def start_scores(mem, n, base, own, L: gl.constexpr, cfg: gl.constexpr):
    """k . q^T of a step, less lse if FOLD: PANELS products in flight. own: where the consumer's
    keys lie."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = mem.lse.index(slot).load(gl.SliceLayout(0, L)) * (-1.0 / base)
    k, q = own * cfg.PANELS, slot * cfg.PANELS
    s = _product(mem.k.index(k), mem.q.index(q), init, L, cfg)
    for i in gl.static_range(1, cfg.PANELS):
        queries = mem.q.index(q + i).permute((1, 0))
        s = warpgroup_mma(mem.k.index(k + i), queries, s, is_async=True)
    return s


@gluon.jit
def start_dp(mem, n, own, L: gl.constexpr, cfg: gl.constexpr):
    """v . dout^T of a step, less delta if FOLD: VALUE_PANELS products in flight."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = -mem.delta.index(slot).load(gl.SliceLayout(0, L))
    v, g = own * cfg.VALUE_PANELS, slot * cfg.VALUE_PANELS
    dp = _product(mem.v.index(v), mem.dout.index(g), init, L, cfg)
    for i in gl.static_range(1, cfg.VALUE_PANELS):
        gradients = mem.dout.index(g + i).permute((1, 0))
        dp = warpgroup_mma(mem.v.index(v + i), gradients, dp, is_async=True)
    return dp


@gluon.jit
def give_ds(mem, n, ds, which, cfg: gl.constexpr):
    """dscore of a step to shared memory, for dq."""
    mbarrier.wait(mem.ds_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    mem.ds.index((n & 1) * 2 + which).store(ds)
