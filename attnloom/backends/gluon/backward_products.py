"""Products of a step of the backward that are started ahead of their use, and dscore on its way to
dq's. Glossary: backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from attnloom.backends.gluon.backward_shared import HALF
from attnloom.backends.gluon.backward_slots import wait_for_room
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
def _products(a, own, b, slot, PANELS: gl.constexpr, init, L: gl.constexpr, cfg: gl.constexpr):
    """a . b^T over panels side by side, from those of `own` and `slot` on, started."""
    i, j = own * PANELS, slot * PANELS
    acc = _product(a.index(i), b.index(j), init, L, cfg)
    for n in gl.static_range(1, PANELS):
        acc = warpgroup_mma(a.index(i + n), b.index(j + n).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def start_scores(mem, n, base, own, L: gl.constexpr, cfg: gl.constexpr):
    """k . q^T of a step, less lse if FOLD: PANELS products in flight. own: where the consumer's
    keys lie."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = mem.lse.index(slot).load(gl.SliceLayout(0, L)) * (-1.0 / base)
    return _products(mem.k, own, mem.q, slot, cfg.PANELS, init, L, cfg)


@gluon.jit
def start_dp(mem, n, own, L: gl.constexpr, cfg: gl.constexpr):
    """v . dout^T of a step, less delta if FOLD: VALUE_PANELS products in flight."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = -mem.delta.index(slot).load(gl.SliceLayout(0, L))
    return _products(mem.v, own, mem.dout, slot, cfg.VALUE_PANELS, init, L, cfg)


@gluon.jit
def give_ds(mem, n, ds, which, cfg: gl.constexpr):
    """dscore of a step to shared memory, for dq."""
    wait_for_room(mem, n, which, cfg)
    mem.ds.index((n & 1) * 2 + which).store(ds)
