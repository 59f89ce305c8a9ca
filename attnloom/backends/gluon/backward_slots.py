"""How slots of the backward go back to who fills them, and dscore from one consumer to the other.

By mbarriers, which cost a barrier of the whole group before each arrival (Triton 3.6); BY_WARP: at
which each warp arrives, and for which each thread waits (addresses.py); or NAMED, by named barriers
(rings.py): whoever is done comes by and goes on, whoever needs the slot waits there. Such a barrier
has no phases and counts everybody: each has one that comes by and one that waits, in turn. So slots
are said to be empty before anything is in them, and whoever waits for them does so once more at the
end.

    NAMED   1: queries and output gradients; 2: dscore that is there, too; 3: dscore that is read,
            without DQ_APART
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import addresses
from attnloom.backends.gluon import builtins as bi
from attnloom.backends.gluon.backward_shared import (
    DO_LEFT,
    DO_THERE,
    DS_LEFT,
    DS_THERE,
    KV_THERE,
    Q_LEFT,
    Q_THERE,
    keys_phase,
)
from attnloom.backends.gluon.rings import phase_of, slot_of

GROUP = gl.constexpr(128)  # threads of a warpgroup
# Numbers of barriers; Triton has one for each partition and one more. dscore's are slot * 2 +
# consumer who waits, and slot alone where one group reads that of both (DQ_APART).
STEPS = gl.constexpr(8)  # of slots of queries, then of output gradients
ROOM = gl.constexpr(4)


@gluon.constexpr_function
def _there(cfg):
    """First number of dscore's that is there."""
    return 12 if cfg.STAGES == 2 else 6


@gluon.jit
def done_with_q(mem, slot, cfg: gl.constexpr):
    """A consumer has read a step's queries."""
    if cfg.NAMED > 0:
        bi.signal(slot + STEPS, 2 * GROUP + 32)
    elif cfg.BY_WARP:
        addresses.arrive(mem.block, slot + Q_LEFT)
    else:
        mbarrier.arrive(mem.q_empty.index(slot))


@gluon.jit
def done_with_do(mem, slot, cfg: gl.constexpr):
    if cfg.NAMED > 0:
        bi.signal(slot + (STEPS + cfg.STAGES), 2 * GROUP + 32)
    elif cfg.BY_WARP:
        addresses.arrive(mem.block, slot + DO_LEFT)
    else:
        mbarrier.arrive(mem.do_empty.index(slot))


@gluon.jit
def wait_for_q(mem, slot, phase, cfg: gl.constexpr):
    """The producer waits for room for queries."""
    if cfg.NAMED > 0:
        bi.meet(slot + STEPS, 2 * GROUP + 32)
    else:
        mbarrier.wait(mem.q_empty.index(slot), phase)


@gluon.jit
def wait_for_do(mem, slot, phase, cfg: gl.constexpr):
    if cfg.NAMED > 0:
        bi.meet(slot + (STEPS + cfg.STAGES), 2 * GROUP + 32)
    else:
        mbarrier.wait(mem.do_empty.index(slot), phase)


@gluon.jit
def start_slots(mem, which, cfg: gl.constexpr):
    """A consumer, before its first tile: all is empty."""
    if cfg.NAMED > 0:
        for slot in gl.static_range(cfg.STAGES):
            done_with_q(mem, slot, cfg)
            done_with_do(mem, slot, cfg)
    if cfg.NAMED > 2:
        for slot in gl.static_range(2):
            bi.signal(which + (ROOM + slot * 2), 2 * GROUP)


@gluon.jit
def end_slots(mem, which, cfg: gl.constexpr):
    """A consumer, after its last tile."""
    if cfg.NAMED > 2:
        for slot in gl.static_range(2):
            bi.meet(which + (ROOM + slot * 2), 2 * GROUP)


@gluon.jit
def end_loads(mem, cfg: gl.constexpr):
    """The producer, after its last step."""
    if cfg.NAMED > 0:
        for slot in gl.static_range(cfg.STAGES):
            wait_for_q(mem, slot, 0, cfg)
            wait_for_do(mem, slot, 0, cfg)


@gluon.jit
def ds_is_there(mem, n, which, cfg: gl.constexpr):
    """A consumer has written its part of dscore of step n, and each thread has fenced it."""
    if cfg.BY_WARP:
        addresses.arrive(mem.block, (n & 1) + DS_THERE)
    elif cfg.NAMED < 2:
        bi.barrier()
        mbarrier.arrive(mem.ds_full.index(n & 1))
    elif cfg.DQ_APART:
        bi.signal((n & 1) + _there(cfg), 3 * GROUP)
    else:
        bi.signal((n & 1) * 2 + (1 - which) + _there(cfg), 2 * GROUP)


@gluon.jit
def wait_for_ds(mem, n, live, which, cfg: gl.constexpr):
    """Before dq of step n, if there is one (live; DQ_APART: there is). which: who asks. A consumer
    has its own part once all its warps are here."""
    if cfg.BY_WARP:
        addresses.wait_if(live, mem.block, (n & 1) + DS_THERE, (n >> 1) & 1)
    elif cfg.NAMED < 2:
        mbarrier.wait(mem.ds_full.index(n & 1), (n >> 1) & 1, pred=live)
    elif cfg.DQ_APART:
        bi.meet((n & 1) + _there(cfg), 3 * GROUP)
    else:
        bi.meet_if(live, (n & 1) * 2 + which + _there(cfg), 2 * GROUP)


@gluon.jit
def done_with_ds(mem, n, live, which, cfg: gl.constexpr):
    """dq of step n has read dscore and keys, if there is one (live)."""
    if cfg.NAMED > 2:
        bi.signal_if(live, (n & 1) * 2 + (1 - which) + ROOM, 2 * GROUP)
    elif cfg.BY_WARP:
        addresses.arrive_if(live, mem.block, (n & 1) + DS_LEFT)
    else:
        mbarrier.arrive(mem.ds_empty.index(n & 1), pred=live)


@gluon.jit
def wait_for_room(mem, n, which, cfg: gl.constexpr):
    """A consumer, before it writes dscore of step n."""
    if cfg.NAMED > 2:
        bi.meet((n & 1) * 2 + which + ROOM, 2 * GROUP)
    elif cfg.BY_WARP:
        addresses.wait(mem.block, (n & 1) + DS_LEFT, ((n >> 1) & 1) ^ 1)
    else:
        mbarrier.wait(mem.ds_empty.index(n & 1), ((n >> 1) & 1) ^ 1)


@gluon.jit
def wait_for_last_dq(mem, n, live, which, cfg: gl.constexpr):
    """A consumer, before it writes over a tile's keys. n: of the tile's last step, if it has one
    (live)."""
    if cfg.NAMED > 2:
        number = (n & 1) * 2 + which + ROOM
        bi.meet_if(live, number, 2 * GROUP)
        # the next tile waits for the room once more
        bi.signal_if(live, number, 2 * GROUP)
    elif cfg.BY_WARP:
        addresses.wait_if(live, mem.block, (n & 1) + DS_LEFT, (n >> 1) & 1)
    else:
        mbarrier.wait(mem.ds_empty.index(n & 1), (n >> 1) & 1, pred=live)


@gluon.jit
def wait_for_queries(mem, n, live, cfg: gl.constexpr):
    """Of step n, if there is one (live)."""
    if cfg.BY_WARP:
        addresses.wait_if(live, mem.block, slot_of(n, cfg) + Q_THERE, phase_of(n, cfg))
    else:
        mbarrier.wait(mem.q_full.index(slot_of(n, cfg)), phase_of(n, cfg), pred=live)


@gluon.jit
def wait_for_gradients(mem, n, cfg: gl.constexpr):
    """Those of the output, of step n."""
    if cfg.BY_WARP:
        addresses.wait(mem.block, slot_of(n, cfg) + DO_THERE, phase_of(n, cfg))
    else:
        mbarrier.wait(mem.do_full.index(slot_of(n, cfg)), phase_of(n, cfg))


@gluon.jit
def wait_for_keys(mem, num, slot, live, cfg: gl.constexpr):
    """And values of the num-th tile, which lie at `slot`, if it has steps (live)."""
    if cfg.BY_WARP:
        addresses.wait_if(live, mem.block, slot + KV_THERE, keys_phase(num, cfg))
    else:
        mbarrier.wait(mem.kv_full.index(slot), keys_phase(num, cfg), pred=live)
