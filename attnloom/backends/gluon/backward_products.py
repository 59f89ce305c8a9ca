"""Products of a step of the backward that are started ahead of their use, and dscore on its way to
dq's. Glossary: backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attnloom.backends.gluon.backward_shared import HALF, PART
from attnloom.backends.gluon.backward_slots import wait_for_room
from attnloom.backends.gluon.forward_wide import add_wide
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


@gluon.constexpr_function
def slices(columns):
    """(first, how many) of so many columns of a tile, in tiles of powers of two."""
    found, first = [], 0
    for width in (128, 64, 32, 16):
        if first + width <= columns:
            found.append((first, width))
            first += width
    return found


@gluon.jit
def _products(
    a, own, b, slot, PANELS: gl.constexpr, COLUMNS: gl.constexpr, init, L: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """a . b^T over the first columns of panels side by side, from those of `own` and `slot` on,
    started: a product in flight for each slice of each panel."""
    SLICES: gl.constexpr = slices(COLUMNS)
    for n in gl.static_range(PANELS):
        left, right = a.index(own * PANELS + n), b.index(slot * PANELS + n)
        for i in gl.static_range(len(SLICES)):
            x = left.slice(SLICES[i][0], SLICES[i][1], 1)
            y = right.slice(SLICES[i][0], SLICES[i][1], 1)
            if n + i == 0:
                acc = _product(x, y, init, L, cfg)
            else:
                acc = warpgroup_mma(x, y.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def start_scores(mem, n, base, own, L: gl.constexpr, cfg: gl.constexpr):
    """k . q^T of a step, less lse if FOLD: a product in flight for each slice of each panel. own:
    where the consumer's keys lie."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = mem.lse.index(slot).load(gl.SliceLayout(0, L)) * (-1.0 / base)
    return _products(mem.k, own, mem.q, slot, cfg.PANELS, cfg.COLUMNS, init, L, cfg)


@gluon.jit
def start_dp(mem, n, own, L: gl.constexpr, cfg: gl.constexpr):
    """v . dout^T of a step, less delta if FOLD, as start_scores."""
    slot = slot_of(n, cfg)
    init = 0.0
    if cfg.FOLD:
        init = -mem.delta.index(slot).load(gl.SliceLayout(0, L))
    return _products(mem.v, own, mem.dout, slot, cfg.VALUE_PANELS, cfg.VALUE_COLUMNS, init, L, cfg)


@gluon.jit
def no_sums(WIDTH: gl.constexpr, cfg: gl.constexpr):
    """dk or dv of a tile before its first step; NATIVE: in three parts."""
    if cfg.NATIVE:
        L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
        zeros = gl.zeros([HALF, PART], gl.float32, L)
        return zeros, zeros, zeros
    else:
        WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
        return gl.zeros([HALF, WIDTH], gl.float32, WHOLE)


@gluon.jit
def as_left(x, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """p or dscore, rounded, as the left operand of dv or dk."""
    if cfg.NATIVE:
        return x
    else:
        L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
        return gl.convert_layout(x, gl.DotOperandLayout(0, L, 2))


@gluon.jit
def add_keys(left, tiles, address, slot, sums, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """sums + left . a step's tile, started as one product. address: of the first tile, NATIVE."""
    if cfg.NATIVE:
        BYTES: gl.constexpr = cfg.TILE_M * WIDTH * 2
        return add_wide(left, address + slot * BYTES, sums, cfg.TILE_M, PART)
    else:
        return warpgroup_mma(left, tiles.index(slot), sums, is_async=True)


@gluon.jit
def give_ds(mem, n, ds, which, cfg: gl.constexpr):
    """dscore of a step to shared memory, for dq."""
    wait_for_room(mem, n, which, cfg)
    mem.ds.index((n & 1) * 2 + which).store(ds)


@gluon.jit
def keys_done(PENDING: gl.constexpr, sums, left, cfg: gl.constexpr):
    """dv and p, or dk and dscore, once at most so many products are in flight."""
    if cfg.NATIVE:
        a, b, c, left = warpgroup_mma_wait(PENDING, [sums[0], sums[1], sums[2], left])
        return (a, b, c), left
    else:
        return warpgroup_mma_wait(PENDING, [sums, left])


@gluon.jit
def dk_done(PENDING: gl.constexpr, dk, ds_left, cfg: gl.constexpr):
    """The same of dk, whose dscore may lie in shared memory."""
    if cfg.DK_SHARED:
        return warpgroup_mma_wait(PENDING, [dk]), ds_left
    else:
        return keys_done(PENDING, dk, ds_left, cfg)
