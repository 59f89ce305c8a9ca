"""Addresses in shared memory, which Gluon's language does not give, and barriers by them.

Shared memory of a program begins at the module's symbol `global_smem`. Tiles swizzled over 128 or
64 bytes begin at multiples of 1024 or 512 bytes, so that few places are possible: a program, when
it begins, clears the first word of each, has a word stored in the tiles that it looks for, and
looks where it lies. That the symbol exists holds of the versions that gate.py admits, which
tests/kernels/test_gluon_compile_forward.py shows; so nothing asks it at run time.

Triton has the warps of a consumer meet (`bar.sync`) before one lane arrives at an mbarrier, and
again around most waits. With the address of a block of barriers a lane of each warp arrives for its
warp, and each thread waits, in a few instructions of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnloom.backends.gluon import builtins as bi

_BLOCK = gl.constexpr(512)  # bytes of a block of barriers, and of a place
_PLACES = gl.constexpr(512)  # a program has up to 454
_NOWHERE = gl.constexpr(0x7FFFFFFF)
_BARRIERS, _TILE = gl.constexpr(1), gl.constexpr(2)  # words that are looked for


@gluon.constexpr_function
def _at_places(what):
    """`what` is done with `at`, the address of place $1, if the program has it. $0 is 0 before."""
    return (
        "{ .reg .pred there; .reg .b32 at, size; mov.b32 $0, 0; mov.u32 size, %dynamic_smem_size; "
        f"mul.lo.u32 at, $1, {int(_BLOCK)}; setp.lt.u32 there, at, size; "
        f"mov.u32 size, global_smem; add.u32 at, at, size; @there {what} " + "}"
    )


_ARRIVE = gl.constexpr("""{
.reg .pred first;
.reg .b32 at;
mad.lo.u32 at, $2, 8, $1;
bar.warp.sync 0xffffffff;
elect.sync _|first, 0xffffffff;
@first mbarrier.arrive.shared::cta.b64 _, [at];
mov.b32 $0, 0;
}""")
_ARRIVE_IF = gl.constexpr("""{
.reg .pred first, live;
.reg .b32 at;
mad.lo.u32 at, $2, 8, $1;
setp.ne.b32 live, $3, 0;
bar.warp.sync 0xffffffff;
elect.sync _|first, 0xffffffff;
and.pred first, first, live;
@first mbarrier.arrive.shared::cta.b64 _, [at];
mov.b32 $0, 0;
}""")
_WAIT = gl.constexpr("""{
.reg .pred done;
.reg .b32 at;
mad.lo.u32 at, $2, 8, $1;
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 done, [at], $3;
@!done bra.uni AGAIN;
mov.b32 $0, 0;
}""")
_WAIT_IF = gl.constexpr("""{
.reg .pred done, live;
.reg .b32 at;
mad.lo.u32 at, $2, 8, $1;
setp.ne.b32 live, $4, 0;
@!live bra.uni DONE;
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 done, [at], $3;
@!done bra.uni AGAIN;
DONE:
mov.b32 $0, 0;
}""")


@gluon.jit
def _places():
    return gl.arange(0, _PLACES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def _at_all(TEXT: gl.constexpr):
    return gl.inline_asm_elementwise(
        TEXT, "=&r,r", [_places()], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _mark(tile, WORD: gl.constexpr):
    """tile: of 16-bit elements."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HELD: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    words = bi.reinterpret(tile, gl.int32, [ROWS, COLUMNS], PLAIN)
    words.store(gl.full([ROWS, COLUMNS], WORD, gl.int32, HELD))


@gluon.jit
def _place_of(words, WORD: gl.constexpr):
    """The address of the first place that has a word."""
    at = gl.min(gl.where(words == WORD, _places() * _BLOCK, _NOWHERE), 0)
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; add.u32 $0, $0, $1;", "=&r,r", [at], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def find(block, tile, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """Addresses of a block of barriers and of a tile swizzled over 128 bytes, of those that are
    asked for. By all warps, before anything lies in shared memory."""
    block_at = bi.scalar(0, gl.int32)
    tile_at = bi.scalar(0, gl.int32)
    if BLOCK or TILE:
        CLEAR: gl.constexpr = _at_places("st.shared.b32 [at], $0;")
        _at_all(CLEAR)
        bi.barrier()
        if BLOCK:
            _mark(block, _BARRIERS)
        if TILE:
            _mark(tile, _TILE)
        bi.barrier()
        READ: gl.constexpr = _at_places("ld.shared.b32 $0, [at];")
        words = _at_all(READ)
        bi.barrier()
        if BLOCK:
            block_at = _place_of(words, _BARRIERS)
        if TILE:
            tile_at = _place_of(words, _TILE)
        bi.barrier()
    return block_at, tile_at


@gluon.jit
def new_block():
    """Memory for 64 barriers, to be found: swizzled for its alignment alone."""
    ALIGNED: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    return gl.allocate_shared_memory(gl.bfloat16, [_BLOCK // 64, 32], ALIGNED)


@gluon.jit
def barriers(block, FIRST: gl.constexpr, COUNT: gl.constexpr, HAS_BLOCK: gl.constexpr):
    """COUNT barriers, up to eight: of a block from number FIRST on, a multiple of as many (of four
    at least), or in memory of their own."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    if HAS_BLOCK:
        ROOM: gl.constexpr = 4 if COUNT <= 4 else 8
        parts = bi.reinterpret(block, gl.int64, [_BLOCK // 8 // ROOM, ROOM], LAYOUT)
        return bi.reinterpret(parts.index(FIRST // ROOM), gl.int64, [ROOM, 1], LAYOUT)
    else:
        return gl.allocate_shared_memory(gl.int64, [COUNT, 1], LAYOUT)


@gluon.jit
def arrive(block, number):
    """Each warp of a partition arrives at a barrier of a block, by one lane, once all of its lanes
    are here. Its address is computed there, or those of all barriers would take registers."""
    gl.inline_asm_elementwise(
        _ARRIVE, "=r,r,r", [block, number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_if(live, block, number):
    live = gl.to_tensor(live).to(gl.int32)
    gl.inline_asm_elementwise(
        _ARRIVE_IF, "=r,r,r,r", [block, number, live], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait(block, number, phase):
    """Each thread waits."""
    gl.inline_asm_elementwise(
        _WAIT, "=r,r,r,r", [block, number, phase], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_if(live, block, number, phase):
    live = gl.to_tensor(live).to(gl.int32)
    gl.inline_asm_elementwise(
        _WAIT_IF, "=r,r,r,r,r", [block, number, phase, live], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_all(block, tiles):
    """Addresses of a block of barriers and of each of a few tiles of 16-bit elements that begin at
    places. By all warps, before anything lies in shared memory."""
    CLEAR: gl.constexpr = _at_places("st.shared.b32 [at], $0;")
    _at_all(CLEAR)
    bi.barrier()
    _mark(block, _BARRIERS)
    for i in gl.static_range(len(tiles)):
        _mark(tiles[i], _TILE + i)
    bi.barrier()
    READ: gl.constexpr = _at_places("ld.shared.b32 $0, [at];")
    words = _at_all(READ)
    bi.barrier()
    found = (_place_of(words, _BARRIERS),)
    for i in gl.static_range(len(tiles)):
        found += (_place_of(words, _TILE + i),)
    bi.barrier()
    return found
