"""Products of [64, K] by [K, 96] of two operands in shared memory, which Triton, whose tiles are
powers of two, has not: `wgmma` written out, with the addresses of both.

The result lies in three pieces of 32 columns in the layout of products (forward_wide.py says why
their registers are those of the instruction). Operands lie in panels side by side, of 64 columns
whose rows of 128 bytes are swizzled over 128, or of 32 whose rows of 64 bytes are over 64:

    k first     the sum goes along rows: an instruction's 16 are 32 bytes of a panel
    turned      the sum goes along columns: an instruction's 16 are 16 rows, and its M or N go from
                panel to panel

Each product is as many bytes from shared memory as M + N are rows: 5 KB an instruction of 48
cycles, where shared memory gives 6.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COLUMNS = gl.constexpr(96)
PIECE = gl.constexpr(32)
_COUNT = gl.constexpr(48)  # registers of a thread
_PACK = gl.constexpr(16)  # of them, of a piece
_K = gl.constexpr(16)  # of an instruction


@gluon.constexpr_function
def operand(rows, columns, width, turned):
    """(low half of a descriptor but for the address, high half, bytes to each 16 along the sum) of
    an operand of so many rows and columns, in panels of `width` columns."""
    rows, columns, width, turned = int(rows), int(columns), int(width), bool(turned)
    row = 2 * width
    panel = rows * row
    swizzle = {64: 1, 32: 2}[width]
    high = (8 * row >> 4) | (swizzle << 30)
    if turned:
        return (panel >> 4) << 16, high, tuple(16 * row * i for i in range(rows // 16))
    steps = tuple(16 * i // width * panel + 16 * i % width * 2 for i in range(columns // 16))
    return 1 << 16, high, steps


@gluon.constexpr_function
def _text(a, b, turned, half, adds, ends):
    """turned: of a, of b. adds: onto what is there, if operand `live` is not 0."""
    count, pack = int(_COUNT), int(_PACK)
    result = ", ".join(f"${i}" for i in range(count))
    live = count + 2 * pack
    lines = [
        "{ .reg .b32 low; .reg .b64 a, b, at, bt; .reg .pred live;",
        "wgmma.fence.sync.aligned;",
        f"shr.u32 low, ${count}, 4; or.b32 low, low, {a[0]}; mov.b64 a, {{low, {a[1]}}};",
        f"shr.u32 low, ${count + pack}, 4; or.b32 low, low, {b[0]}; mov.b64 b, {{low, {b[1]}}};",
    ]
    if adds:
        lines.append(f"setp.ne.b32 live, ${live}, 0;")
    for i in range(len(a[2])):
        left, right = a[2][i], b[2][i]
        onto = "1" if i else "live" if adds else "0"
        lines.append(
            f"add.s64 at, a, {left >> 4}; add.s64 bt, b, {right >> 4};"
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{half}.{half} {{{result}}}, "
            f"at, bt, {onto}, 1, 1, {int(turned[0])}, {int(turned[1])};"
        )
    if ends:
        lines.append("wgmma.commit_group.sync.aligned;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _constraints(adds):
    count, pack = int(_COUNT), int(_PACK)
    taken = ["r"] * (2 * pack)
    if adds:
        taken += ["r"] * pack + [str(i) for i in range(count)]
    return ",".join(["=f"] * count + taken)


@gluon.constexpr_function
def _name(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def new_product(a, b, A: gl.constexpr, B: gl.constexpr, TURNED: gl.constexpr, cfg: gl.constexpr):
    """a . b, started as one group. a, b: addresses; A, B: see `operand`; TURNED: a is, b is."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    HALF: gl.constexpr = _name(cfg.OPERAND)
    TEXT: gl.constexpr = _text(A, B, TURNED, HALF, False, True)
    CONSTRAINTS: gl.constexpr = _constraints(False)
    return gl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        [gl.full([64, PIECE], a, gl.int32, L), gl.full([64, PIECE], b, gl.int32, L)],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=_PACK,
    )


@gluon.jit
def add_product(
    a, b, live, acc, A: gl.constexpr, B: gl.constexpr, TURNED: gl.constexpr, ENDS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """acc + a . b, or a . b alone if not live, started; ENDS: the group ends with it."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    HALF: gl.constexpr = _name(cfg.OPERAND)
    TEXT: gl.constexpr = _text(A, B, TURNED, HALF, True, ENDS)
    CONSTRAINTS: gl.constexpr = _constraints(True)
    return gl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        [
            gl.full([64, PIECE], a, gl.int32, L),
            gl.full([64, PIECE], b, gl.int32, L),
            gl.full([64, PIECE], live, gl.int32, L),
            acc[0],
            acc[1],
            acc[2],
        ],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=_PACK,
    )


@gluon.jit
def lane_place():
    """Where a lane of a warpgroup stores eight numbers of 16 bits of a row: bytes into a panel of
    32 columns of 64 rows, swizzled over 64 bytes. For each element of a piece, all of a lane
    alike."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    r = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, PIECE, gl.SliceLayout(0, L))[None, :]
    # rows 0 to 7 and 8 to 15 of a warp's, then the same of the next eight columns
    lane = (r % 8) * 4 + (c % 8) // 2
    row = r // 16 * 16 + lane % 16
    return row * 64 + (((lane // 16) ^ ((row // 2) % 4)) * 16)


@gluon.constexpr_function
def _store_text():
    """Panels of 4096 bytes: values are $16 to $39, the address $40, the lane's place
    $56."""
    lines = ["{ .reg .b32 one, other; add.u32 one, $40, $56; xor.b32 other, one, 32;"]
    for piece in range(3):
        for i in range(2):
            first = 16 + 8 * piece + 4 * i
            values = ", ".join(f"${first + j}" for j in range(4))
            at = "other" if i else "one"
            lines.append(
                f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{at} + {4096 * piece}], {{{values}}};"
            )
    return "\n".join([*lines, *(f"mov.b32 ${i}, 0;" for i in range(16)), "}"])


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=&r"] * 16 + ["r"] * (24 + 32))


@gluon.jit
def store_96(x, address, lane):
    """Three pieces of [64, 32] of 16 bits to panels side by side. lane: `lane_place`;
    address: of the first. By address, or Triton would have the warps meet between the pieces."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    TEXT: gl.constexpr = _store_text()
    CONSTRAINTS: gl.constexpr = _store_constraints()
    gl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        [
            x[0],
            x[1],
            x[2],
            gl.full([64, PIECE], address, gl.int32, L),
            lane,
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=_PACK,
    )
