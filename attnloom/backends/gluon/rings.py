"""Rings of slots in shared memory, as both phases fill and empty them, and scalars left there.

The n-th step or tile of a warp takes slot n & (STAGES - 1); the phase of its barriers is the parity
of how often that slot was used before. Whoever fills a slot waits for its barrier "empty" in the
phase before, whoever empties it for "full" in the phase itself.

NAMED: slots of keys and values have named barriers in place of "empty". Triton has all warps of a
partition meet before one lane arrives at an mbarrier; a named one each warp passes for itself, once
its own products are done. What is copied there next needs no fence: products alone read keys and
values, by the way that copies write them (the async proxy), and a warp waits for its products
before it passes; a named barrier orders what was done before it for whoever meets there. Nobody
passes one for a slot again before it is full again, which takes all that have to pass.

BY_WARP: all warps have barriers in shared memory, at whose addresses one lane of each arrives.

TURNS: consumers issue the products of a step one after the other, round and round: each waits at a
named barrier of its own, which the one before it passes once its own products are issued, so that
exponentials of one run beside products of another (ping-pong scheduling, Shah et al. 2024).

Keys in panels may have five places for the six of two steps, taken round and round: the last panel
of a step comes when the step before has given back its keys, the others when the one before that
has. Barriers stay those of two slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import addresses
from attnloom.backends.gluon import builtins as bi

# Of 16 named barriers of a program; Triton takes the first ones, up to one more than partitions.
KEYS_LEFT = gl.constexpr(8)
VALUES_LEFT = gl.constexpr(12)
TURN = gl.constexpr(8)  # of three consumers; BY_WARP, which leaves these to them
# BY_WARP: places of barriers in their block, those of slots given back as above.
KEYS_THERE = gl.constexpr(0)
VALUES_THERE = gl.constexpr(4)
QUERIES_THERE = gl.constexpr(16)
QUERIES_LEFT = gl.constexpr(24)
TAGS_THERE = gl.constexpr(32)
COLUMNS_THERE = gl.constexpr(36)
JOBS_THERE = gl.constexpr(40)
JOBS_LEFT = gl.constexpr(44)


@gluon.jit
def slot_of(n, cfg: gl.constexpr):
    return n & (cfg.STAGES - 1)


@gluon.jit
def phase_of(n, cfg: gl.constexpr):
    return (n >> cfg.LOG_STAGES) & 1


@gluon.jit
def key_panel(n, i: gl.constexpr, cfg: gl.constexpr):
    """Where panel i of the keys of step n lies."""
    if cfg.KEY_PANELS < cfg.STAGES * cfg.PANELS:
        place = (n * cfg.PANELS) % cfg.KEY_PANELS + i
        return gl.where(place < cfg.KEY_PANELS, place, place - cfg.KEY_PANELS)
    else:
        return slot_of(n, cfg) * cfg.PANELS + i


@gluon.constexpr_function
def readers(cfg):
    """Threads that come by the barrier of a slot of keys or values that is given back: those of
    the consumers, of the producer and of the warp of columns."""
    return 32 * int(cfg.WARPS) * int(cfg.CONSUMERS) + (64 if int(cfg.NUM_COLUMNS) > 0 else 32)


@gluon.jit
def wait_there(mem, full, slot, phase, FIRST: gl.constexpr, cfg: gl.constexpr):
    """A consumer waits for what is copied to a slot. full: its ring's barriers, FIRST ..."""
    if cfg.BY_WARP:
        addresses.wait(mem.block, slot + FIRST, phase)
    else:
        mbarrier.wait(full.index(slot), phase)


@gluon.jit
def wait_there_if(live, mem, full, slot, phase, FIRST: gl.constexpr, cfg: gl.constexpr):
    """The same, if anything is."""
    if cfg.BY_WARP:
        addresses.wait_if(live, mem.block, slot + FIRST, phase)
    else:
        mbarrier.wait(full.index(slot), phase, pred=live)


@gluon.jit
def leave(mem, empty, slot, FIRST: gl.constexpr, cfg: gl.constexpr):
    """A consumer is done with a slot of keys or values. empty: its ring's barriers; NAMED: FIRST
    .. FIRST + STAGES - 1."""
    if cfg.BY_WARP:
        addresses.arrive(mem.block, slot + FIRST)
    elif cfg.NAMED:
        bi.signal(slot + FIRST, readers(cfg))
    else:
        mbarrier.arrive(empty.index(slot))


@gluon.jit
def leave_if(live, mem, empty, slot, FIRST: gl.constexpr, cfg: gl.constexpr):
    """The same, if it has a slot."""
    if cfg.BY_WARP:
        addresses.arrive_if(live, mem.block, slot + FIRST)
    elif cfg.NAMED:
        if cfg.MAY_BE_EMPTY:
            bi.signal_if(live, slot + FIRST, readers(cfg))
        else:
            bi.signal(slot + FIRST, readers(cfg))
    else:
        mbarrier.arrive(empty.index(slot), pred=live)


@gluon.jit
def leave_queries(mem, slot, cfg: gl.constexpr):
    """A consumer is done with its queries."""
    if cfg.BY_WARP:
        addresses.arrive(mem.block, slot + QUERIES_LEFT)
    else:
        mbarrier.arrive(mem.q_empty.index(slot))


@gluon.jit
def wait_left(empty, n, FIRST: gl.constexpr, cfg: gl.constexpr):
    """Until all are done with what was in the slot of step n before."""
    slot = slot_of(n, cfg)
    if cfg.NAMED:
        bi.meet_if(n >= cfg.STAGES, slot + FIRST, readers(cfg))
    else:
        mbarrier.wait(empty.index(slot), phase_of(n, cfg) ^ 1)


@gluon.jit
def first_turn(consumer, cfg: gl.constexpr):
    """The last consumer lets the first one begin."""
    if cfg.TURNS:
        bi.signal_if(consumer == cfg.CONSUMERS - 1, TURN + consumer * 0, 64 * cfg.WARPS)


@gluon.jit
def last_turn(consumer, cfg: gl.constexpr):
    """What the last consumer passed last is met, or a barrier would be left half passed."""
    if cfg.TURNS:
        bi.meet_if(consumer == 0, TURN + consumer, 64 * cfg.WARPS)


@gluon.jit
def take_turn(consumer, cfg: gl.constexpr):
    if cfg.TURNS:
        bi.meet(TURN + consumer, 64 * cfg.WARPS)


@gluon.jit
def leave_turn_if(live, consumer, cfg: gl.constexpr):
    """A consumer that has no product to issue takes its turn and passes it, if `live`."""
    if cfg.TURNS:
        bi.meet_if(live, TURN + consumer, 64 * cfg.WARPS)
        following = gl.where(consumer == cfg.CONSUMERS - 1, 0, consumer + 1)
        bi.signal_if(live, TURN + following, 64 * cfg.WARPS)


@gluon.jit
def pass_turn(consumer, cfg: gl.constexpr):
    if cfg.TURNS:
        following = gl.where(consumer == cfg.CONSUMERS - 1, 0, consumer + 1)
        bi.signal(TURN + following, 64 * cfg.WARPS)


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
