"""Products of a step of backward_roles.py, and the way of dq to memory. Glossary:
backward_shared.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from attnloom.backends.gluon.products_96 import (
    COLUMNS,
    PIECE,
    add_product,
    new_product,
    operand,
)
from attnloom.backends.gluon.roles_shared import KEYS

_PANEL = gl.constexpr(64 * 64 * 2)  # bytes of a step's rows in 64 columns


@gluon.jit
def start_scores(mem, n, cfg: gl.constexpr):
    Q: gl.constexpr = operand(64, 64 * cfg.PANELS, 64, False)
    K: gl.constexpr = operand(KEYS, 64 * cfg.PANELS, 32, False)
    q = mem.q_at + (n & 1) * (cfg.PANELS * _PANEL)
    return new_product(q, mem.k_at, Q, K, (False, False), cfg)


@gluon.jit
def start_dp(mem, n, cfg: gl.constexpr):
    DO: gl.constexpr = operand(64, 64 * cfg.VALUE_PANELS, 64, False)
    V: gl.constexpr = operand(KEYS, 64 * cfg.VALUE_PANELS, 64, False)
    do = mem.do_at + (n & 1) * (cfg.VALUE_PANELS * _PANEL)
    return new_product(do, mem.v_at, DO, V, (False, False), cfg)


@gluon.jit
def start_dq(mem, n, WHICH: gl.constexpr, cfg: gl.constexpr):
    """dscore . k of a step, a consumer's 96 columns."""
    A: gl.constexpr = operand(64, KEYS, 32, False)
    B: gl.constexpr = operand(KEYS, COLUMNS, 32, True)
    ds = mem.ds_at + (n & 1) * (64 * KEYS * 2)
    k = mem.k_at + WHICH * (KEYS * COLUMNS * 2)
    return new_product(ds, k, A, B, (False, True), cfg)


@gluon.jit
def _start_turned(at, rows_at, live, acc, PANELS: gl.constexpr, cfg: gl.constexpr):
    """acc + x^T . y, x: [64, PANELS of 64 columns] at `at`, y: [64, 96] at `rows_at`; one group.
    acc: three pieces for each panel."""
    A: gl.constexpr = operand(64, 64, 64, True)
    B: gl.constexpr = operand(64, KEYS, 32, True)
    TURNED: gl.constexpr = (True, True)
    a0 = add_product(at, rows_at, live, acc[0:3], A, B, TURNED, PANELS == 1, cfg)
    if PANELS > 1:
        a1 = add_product(at + _PANEL, rows_at, live, acc[3:6], A, B, TURNED, PANELS == 2, cfg)
        a0 += a1
    if PANELS > 2:
        a2 = add_product(at + 2 * _PANEL, rows_at, live, acc[6:9], A, B, TURNED, True, cfg)
        a0 += a2
    return a0


@gluon.jit
def zeros(PANELS: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    zero = gl.zeros([64, PIECE], gl.float32, L)
    found = (zero, zero, zero)
    for _ in gl.static_range(PANELS - 1):
        found += (zero, zero, zero)
    return found


@gluon.jit
def done(PENDING: gl.constexpr, acc):
    """All pieces, once at most so many groups are in flight."""
    if len(acc) == 9:
        a, b, c, d, e, f, g, h, i = warpgroup_mma_wait(
            PENDING,
            [acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7], acc[8]],
        )
        return (a, b, c, d, e, f, g, h, i)
    elif len(acc) == 6:
        a, b, c, d, e, f = warpgroup_mma_wait(
            PENDING, [acc[0], acc[1], acc[2], acc[3], acc[4], acc[5]]
        )
        return (a, b, c, d, e, f)
    else:
        a, b, c = warpgroup_mma_wait(PENDING, [acc[0], acc[1], acc[2]])
        return (a, b, c)


@gluon.jit
def start_dv(mem, n, live, dv, cfg: gl.constexpr):
    do = mem.do_at + (n & 1) * (cfg.VALUE_PANELS * _PANEL)
    return _start_turned(do, mem.p_at, live.to(gl.int32), dv, cfg.VALUE_PANELS, cfg)


@gluon.jit
def start_dk(mem, n, live, dk, cfg: gl.constexpr):
    q = mem.q_at + (n & 1) * (cfg.PANELS * _PANEL)
    ds = mem.ds_at + (n & 1) * (64 * KEYS * 2)
    return _start_turned(q, ds, live.to(gl.int32), dk, cfg.PANELS, cfg)


@gluon.jit
def dq_places(WHICH: gl.constexpr, cfg: gl.constexpr):
    """Bytes from a step's dq to what a lane has of the first columns of a consumer; see
    backward_dq.dq_places."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    r = gl.arange(0, cfg.TILE_M, gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, PIECE, gl.SliceLayout(0, L))[None, :]
    lane = (r % 8) * 4 + (c % 8) // 2
    first: gl.constexpr = WHICH * (COLUMNS // 8) * 512
    return ((r // 16) * 128 + lane * 4 + first).to(gl.int64) * 4


@gluon.constexpr_function
def _addition(piece):
    """Sixteen registers to memory at $32, 2048 bytes for eight columns."""
    text = ""
    for i in range(4):
        values = ", ".join(f"${16 + 4 * i + j}" for j in range(4))
        at = (4 * int(piece) + i) * 2048
        text += f"red.relaxed.gpu.global.add.v4.f32 [$32 + {at}], {{{values}}};\n"
    return text + "".join(f"mov.u32 ${i}, 0;" for i in range(16))


@gluon.constexpr_function
def _addition_constraints():
    return ",".join(["=r"] * 16 + ["f"] * 16 + ["l"] * 16)


@gluon.jit
def _add_piece(dq, at, PIECE_OF: gl.constexpr):
    TEXT: gl.constexpr = _addition(PIECE_OF)
    CONSTRAINTS: gl.constexpr = _addition_constraints()
    gl.inline_asm_elementwise(TEXT, CONSTRAINTS, [dq, at], dtype=gl.int32, is_pure=False, pack=16)


@gluon.jit
def add_dq(dq_ptr, places, line, dq, cfg: gl.constexpr):
    """A consumer's columns of a step's dq to memory."""
    start = (dq_ptr + line.to(gl.int64) * (cfg.PANELS * cfg.D)).to(gl.int64)
    for i in gl.static_range(3):
        _add_piece(dq[i], start + places, i)
