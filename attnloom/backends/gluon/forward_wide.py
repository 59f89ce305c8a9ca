"""Products p . v of 96 and 192 columns at once, which Triton, whose tiles are powers of two, has
not: `wgmma` written out, with the address of its operand in shared memory.

An accumulator lies in three pieces of a power of two. Of a thread's registers of an instruction of
3 * n columns the first third are those of the first n columns, and so on: pieces of n columns in
the layout of products, one after the other, are the registers that the instruction names. The same
holds of the weights: 8 values of a thread are 16 columns, four registers of the other operand.

Gluon gives no address of shared memory. A program finds it when it begins: it clears the first word
of every 1024 bytes, where alone tiles swizzled over 128 bytes may begin, has a word stored in the
tile, and looks where it lies. That shared memory is called `global_smem`, and that ptxas takes
products written so without waiting for each, holds of the versions that gate.py admits, which
tests/kernels/test_gluon_compile_forward.py shows; so nothing asks it at run time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnloom.backends.gluon import builtins as bi

_LOG_UNIT = gl.constexpr(10)  # tiles begin at multiples of 1024 bytes
_GROUP = gl.constexpr(1024)  # bytes of eight rows of a panel
_WORD = gl.constexpr(0x5EED1E57)
_NOWHERE = gl.constexpr(0x7FFFFFFF)
_PLACES = gl.constexpr(256)  # as many units as 8 bits count; a program has up to 227
_K = gl.constexpr(16)  # keys of an instruction
_ROW = gl.constexpr(128)  # bytes of a panel's row


@gluon.constexpr_function
def _at_places(what):
    """`what` is done with `at`, the address of unit $1, if the program has it. $0 is 0 before."""
    return (
        "{ .reg .pred there; .reg .b32 at, size; mov.b32 $0, 0; mov.u32 size, %dynamic_smem_size; "
        f"shl.b32 at, $1, {int(_LOG_UNIT)}; setp.lt.u32 there, at, size; "
        f"mov.u32 size, global_smem; add.u32 at, at, size; {what} " + "}"
    )


@gluon.constexpr_function
def _looking(word, nowhere):
    return _at_places(
        f"@there ld.shared.b32 $0, [at]; setp.eq.and.b32 there, $0, {word}, there; "
        f"selp.b32 $0, at, {nowhere}, there;"
    )


@gluon.jit
def _places():
    return gl.arange(0, _PLACES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def clear_beginnings():
    """To be called by all warps before anything lies in shared memory."""
    TEXT: gl.constexpr = _at_places("@there st.shared.b32 [at], $0;")
    gl.inline_asm_elementwise(TEXT, "=&r,r", [_places()], dtype=gl.int32, is_pure=False, pack=1)
    bi.barrier()


@gluon.jit
def address_of(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Of a tile of 16-bit elements that is not in use yet, swizzled over 128 bytes; for all warps,
    and after `clear_beginnings`."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HELD: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    words = bi.reinterpret(tile, gl.int32, [ROWS, COLUMNS // 2], PLAIN)
    words.store(gl.full([ROWS, COLUMNS // 2], _WORD, gl.int32, HELD))
    bi.barrier()
    TEXT: gl.constexpr = _looking(_WORD, _NOWHERE)
    found = gl.inline_asm_elementwise(
        TEXT, "=&r,r", [_places()], dtype=gl.int32, is_pure=False, pack=1
    )
    bi.barrier()
    return gl.min(found, 0)


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
