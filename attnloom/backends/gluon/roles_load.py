"""The producer warp of backward_roles.py: keys and values of a tile in the panels that its
products read, then every step's queries, output gradients and row statistics. Of each step it says
which keys are seen, by pieces of PIECE.

Glossary, beyond backward_shared.py
    flags        of a step: 2 + partial for each piece whose block is live, as entries of lists have
                 them (merged_lists.py)
    tag          its first query * 2 + flags * 2 + whether the mask is to be applied: a step has 64
                 queries, so that seven bits are free
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon import merged_lists
from attnloom.backends.gluon.backward_load import _load_step
from attnloom.backends.gluon.backward_shared import entries_of, unit_of
from attnloom.backends.gluon.products_96 import PIECE
from attnloom.backends.gluon.rings import box
from attnloom.backends.gluon.roles_shared import GROUPS, KEYS

FLAG_BITS = gl.constexpr(merged_lists.FLAG_BITS)
FLAGS = gl.constexpr((1 << merged_lists.FLAG_BITS) - 1)
FULL = gl.constexpr(0b101010)
PARTIAL = gl.constexpr(0b111111)


@gluon.jit
def _load_keys(k_desc, v_desc, mem, at, cfg: gl.constexpr):
    P: gl.constexpr = cfg.PANELS
    VP: gl.constexpr = cfg.VALUE_PANELS
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 16, 4)
    full = mem.kv_full.index(0)
    mbarrier.expect(full, KEYS * (P * cfg.D + VP * cfg.DV) * 2)
    for g in gl.static_range(GROUPS):
        row = at.start + g * PIECE
        for i in gl.static_range(2 * P):
            tile = mem.k.index(i * GROUPS + g)
            tile = bi.reinterpret(tile, cfg.OPERAND, [1, 1, PIECE, PIECE], NARROW)
            bi.async_load(k_desc, [at.b_kv, at.h_kv, row, i * PIECE], full, tile)
        for i in gl.static_range(VP):
            tile = box(mem.v.index(i * GROUPS + g), PIECE, cfg.DV, cfg)
            bi.async_load(v_desc, [at.b_kv, at.h_kv, row, i * cfg.DV], full, tile)


@gluon.jit
def load(q_desc, do_desc, k_desc, v_desc, stats, mem, at, cfg: gl.constexpr):
    """The partition of the producer."""
    _load_keys(k_desc, v_desc, mem, at, cfg)
    # keys past KV_LEN are zeros, whose exponents may be infinite
    overhangs = (at.start + KEYS > at.kv_len).to(gl.int32) if cfg.HAS_TAIL else 0
    n = bi.scalar(0, gl.int32)
    for unit in range(0, at.units):
        b, h = unit_of(at, unit)
        if cfg.HAS_LISTS:
            first, last = entries_of(at, b, h)
            # loaded a step ahead: a load in place would delay the copies by its latency
            entry = gl.load(at.entries + first, mask=first < last, other=0)
            for t in range(first * cfg.SUB, last * cfg.SUB):
                block = entry >> FLAG_BITS
                row = (block * cfg.SUB + (t & (cfg.SUB - 1)).to(gl.int32)) * cfg.TILE_M
                flags = entry & FLAGS
                tag = flags * 2 + ((flags != FULL).to(gl.int32) | overhangs)
                entry = gl.load(at.entries + gl.minimum((t + 1) // cfg.SUB, last - 1))
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, 0, tag, n, cfg)
                n += 1
        else:
            TAG: gl.constexpr = PARTIAL * 2 + 1 if cfg.HAS_MASK else FULL * 2
            tag = TAG | overhangs
            for row in range(0, at.q_len, cfg.TILE_M):
                _load_step(q_desc, do_desc, stats, mem, at, b, h, row, 0, tag, n, cfg)
                n += 1
