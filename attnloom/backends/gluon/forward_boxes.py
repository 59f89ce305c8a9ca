"""Steps whose keys are copied BOX rows at a time: how they are told, and loaded.

Three boxes of 32 keys are a step of 96, which blocks of a mask are no multiple of. Under a mask
with lists they are the next three of those that live blocks have, one block after the other, which
need not be neighbours; so the mask is applied by the rows of each box, and to all three if the
block of one is partial. The last step of a tile may have fewer: the others begin where keys end.

Glossary: forward_shared.py. place: of a step, the rows of its boxes; four steps have room, as
consumers read it after they have given back the step's keys, and before they do so of the second
step after it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.rings import (
    KEYS_LEFT,
    VALUES_LEFT,
    box,
    put,
    slot_of,
    wait_left,
)

BOXES = gl.constexpr(3)  # of a step
PLACES = gl.constexpr(4)  # twice the slots of a ring


@gluon.jit
def rows_of(mem, n, cfg: gl.constexpr):
    """First rows of the boxes of step n, for a consumer that applies the mask to it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 4, LAYOUT)
    place = mem.places.index(n & (PLACES - 1)).load(LAYOUT)
    left = gl.sum(gl.where(i == 0, place, 0), 0)
    middle = gl.sum(gl.where(i == 1, place, 0), 0)
    return left, middle, gl.sum(gl.where(i == 2, place, 0), 0)


@gluon.jit
def steps_of(first, last, cfg: gl.constexpr):
    """Of a tile, which has these boxes of a list; without lists, these steps."""
    if cfg.HAS_LISTS:
        return (last - first + BOXES - 1) // BOXES
    else:
        return last - first


@gluon.jit
def entries_at(lists, first, last, cfg: gl.constexpr):
    """Entries of a list that have the boxes from `first` on; past its end, the last one."""
    if cfg.HAS_LISTS:
        left = _entry_at(lists, first, last, cfg)
        middle = _entry_at(lists, first + 1, last, cfg)
        return left, middle, _entry_at(lists, first + 2, last, cfg)
    else:
        return 0, 0, 0


@gluon.jit
def _entry_at(lists, at, last, cfg: gl.constexpr):
    place = gl.maximum(gl.minimum(at, last - 1), 0) // cfg.SUB
    return gl.load(lists[0] + place, mask=last > 0, other=0)


@gluon.jit
def _box_of(entry, at, last, kv_len, overhang, cfg: gl.constexpr):
    """(first row, whether the mask is to be applied) of box `at` of a list."""
    live = at < last
    block = entry >> 1
    row = (block * cfg.SUB + (at & (cfg.SUB - 1)).to(gl.int32)) * cfg.BOX
    partial = (entry & 1) | (block == overhang).to(gl.int32)
    return gl.where(live, row, kv_len), gl.where(live, partial, 1)


@gluon.jit
def load_boxes(k_desc, v_desc, lists, mem, b, h, first, last, entries, ends, n, cfg: gl.constexpr):
    """As forward_load._load_keys, of boxes; without lists, steps. ends = (KV_LEN, what overhangs
    it)."""
    kv_len, overhang = ends
    STEP: gl.constexpr = BOXES if cfg.HAS_LISTS else 1
    for t in range(first, last, STEP):
        if cfg.HAS_LISTS:
            left, flag0 = _box_of(entries[0], t, last, kv_len, overhang, cfg)
            middle, flag1 = _box_of(entries[1], t + 1, last, kv_len, overhang, cfg)
            right, flag2 = _box_of(entries[2], t + 2, last, kv_len, overhang, cfg)
            rows = (left, middle, right)
            flag = flag0 | flag1 | flag2
            # loaded a step ahead: a load in place would delay the copies by its latency
            entries = entries_at(lists, t + BOXES, last, cfg)
        else:
            row = t * cfg.TILE_N
            rows = (row, row + cfg.BOX, row + 2 * cfg.BOX)
            flag = 1 if cfg.HAS_MASK else (t == overhang).to(gl.int32)
        _load_three(k_desc, v_desc, mem, b, h, rows, flag, n, cfg)
        n += 1
    return n


@gluon.jit
def _load_three(k_desc, v_desc, mem, b, h, rows, flag, n, cfg: gl.constexpr):
    SIZE: gl.constexpr = cfg.TILE_N * cfg.PANELS * 2
    slot = slot_of(n, cfg)
    full = mem.k_full.index(slot)
    wait_left(mem.k_empty, n, KEYS_LEFT, cfg)
    if cfg.NEEDS_KEYS:
        put(mem.tags.index(slot), flag)
        i = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
        place = gl.where(i == 0, rows[0], gl.where(i == 1, rows[1], rows[2]))
        mem.places.index(n & (PLACES - 1)).store(place)
    mbarrier.expect(full, SIZE * cfg.D)
    _load_panels(k_desc, mem.k, full, b, h, rows, slot, cfg.D, cfg)
    full = mem.v_full.index(slot)
    wait_left(mem.v_empty, n, VALUES_LEFT, cfg)
    mbarrier.expect(full, SIZE * cfg.DV)
    _load_panels(v_desc, mem.v, full, b, h, rows, slot, cfg.DV, cfg)


@gluon.jit
def _load_panels(desc, tiles, full, b, h, rows, slot, WIDTH: gl.constexpr, cfg: gl.constexpr):
    """Panels of WIDTH columns, each with the boxes of a step one after the other."""
    for j in gl.static_range(BOXES):
        for i in gl.static_range(cfg.PANELS):
            tile = box(tiles.index((slot * cfg.PANELS + i) * BOXES + j), cfg.BOX, WIDTH, cfg)
            bi.async_load(desc, [b, h, rows[j], i * WIDTH], full, tile)
