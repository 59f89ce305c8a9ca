"""Products p . v of 96 and 192 columns at once, which Triton, whose tiles are powers of two, has
not: `wgmma` written out, with the address of its operand in shared memory.

An accumulator lies in three pieces of a power of two. Of a thread's registers of an instruction of
3 * n columns the first third are those of the first n columns, and so on: pieces of n columns in
the layout of products, one after the other, are the registers that the instruction names. The same
holds of the weights: 8 values of a thread are 16 columns, four registers of the other operand.

Where the values lie is found when a program begins (addresses.py). That ptxas takes products
written so without waiting for each holds of the versions that gate.py admits, as
tests/kernels/test_gluon_compile_forward.py shows, so nothing asks it at run time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_GROUP = gl.constexpr(1024)  # bytes of eight rows of a panel
_K = gl.constexpr(16)  # keys of an instruction
_ROW = gl.constexpr(128)  # bytes of a panel's row


@gluon.constexpr_function
def _text(keys, piece, half):
    """acc += p . v: operands are the accumulator's registers, out; the address; the weights'; the
    accumulator's, in."""
    count = 3 * piece // 2
    address, first = count, count + piece // 2
    accumulator = ", ".join(f"${i}" for i in range(count))
    high = (int(_GROUP) >> 4) | (1 << 30)  # of eight rows to the next; swizzled over 128 bytes
    panel = keys * int(_ROW) >> 4  # of 64 columns to the next 64
    lines = [
        "{ .reg .b32 low; .reg .b64 from;",
        "wgmma.fence.sync.aligned;",
        f"shr.u32 low, ${address}, 4; or.b32 low, low, {panel << 16};",
        f"mov.b64 from, {{low, {high}}};",
    ]
    for i in range(keys // int(_K)):
        operand = ", ".join(f"${first + 4 * i + j}" for j in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{3 * piece}k16.f32.{half}.{half} "
            f"{{{accumulator}}}, {{{operand}}}, from, 1, 1, 1, 1;"
        )
        if i + 1 < keys // int(_K):
            lines.append(f"add.u64 from, from, {int(_K) * int(_ROW) >> 4};")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _constraints(keys, piece):
    count = 3 * piece // 2
    taken = ["r"] * (piece // 2 + keys // 4) + [str(i) for i in range(count)]
    return ",".join(["=f"] * count + taken)


@gluon.jit
def _parts(p, PIECE: gl.constexpr):
    """Columns of the weights, PIECE at a time, in the layout of the accumulator's pieces."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    if N == PIECE:
        OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
        return (gl.convert_layout(p, OUT, assert_trivial=True),)
    else:
        left, right = p.reshape([M, 2, N // 2]).permute(0, 2, 1).split()
        return _parts(left, PIECE) + _parts(right, PIECE)


@gluon.jit
def add_wide(p, address, acc, KEYS: gl.constexpr, PIECE: gl.constexpr):
    """acc + p . v, in flight as one group. p: [64, KEYS], 16 bits, in the layout of products; acc:
    three times [64, PIECE]; address: of KEYS rows of v, in panels of 64 columns side by side."""
    HALF: gl.constexpr = "bf16" if p.dtype == gl.bfloat16 else "f16"
    TEXT: gl.constexpr = _text(KEYS, PIECE, HALF)
    CONSTRAINTS: gl.constexpr = _constraints(KEYS, PIECE)
    parts = _parts(p, PIECE)
    return gl.inline_asm_elementwise(
        TEXT,
        CONSTRAINTS,
        (address,) + parts + acc,  # noqa: RUF005 Gluon knows no stars
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=PIECE // 2,
    )
