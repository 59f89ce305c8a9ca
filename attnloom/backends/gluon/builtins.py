"""Operations that Gluon's compiler has and its language does not export.

A `builtin` is one as Triton's own are: it sees the compiler's semantic object at compile time.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import (
    _unwrap_if_constexpr,
    builtin,
    distributed_type,
)
from triton.experimental.gluon.language._semantic import GluonCallerContext
from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed after 3.6: a tile to shared memory (descriptor, coordinates, barrier, memory), and from it
# (descriptor, coordinates, memory).
if "async_store" in tma.__all__:
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@builtin
def scalar(value: Any, dtype: Any, _semantic: Any = None) -> Any:
    """A scalar of a type. `tl.full((), ...)` asks for a layout here, which a scalar has none of."""
    return _semantic.scalar_constant(_unwrap_if_constexpr(value), _unwrap_if_constexpr(dtype))


@builtin
def barrier(_semantic: Any = None) -> None:
    """All threads of a warpgroup wait for each other; the function's name depends on the version. A
    constexpr that holds it would put its address into the key of the kernel's cache entry."""
    _semantic.debug_barrier()


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory with another shape and layout; the method's name depends on the version."""
    found = getattr(memory, "reinterpret", None) or memory._reinterpret
    return found(dtype, shape, layout, _semantic=_semantic)


@builtin
def laid_out(values: Any, layout: Any, _semantic: Any = None) -> Any:
    """A tuple's vectors in another layout; what is no vector stays."""
    layout = _unwrap_if_constexpr(layout)
    return gl.tuple(
        [
            _semantic.convert_layout(value, layout)
            if isinstance(getattr(value, "type", None), distributed_type)
            else value
            for value in values
        ]
    )


@builtin
def warp_specialize(
    partitions: Any, warps: Any, registers: Any, _semantic: Any = None, _generator: Any = None
) -> Any:
    """As the language's, without partitions of no warps, and with one name for functions in all
    partitions of as many. The language calls functions by another name in the first partition,
    which has the warps of the kernel, and reads them twice."""
    counts = [_unwrap_if_constexpr(count) for count in warps]
    there = [n for n, count in enumerate(counts) if count]
    partitions = [partitions[0], *(partitions[n + 1] for n in there)]
    warps, registers = [counts[n] for n in there], [registers[n] for n in there]
    num_warps = _semantic.builder.options.num_warps
    before = _generator.caller_context
    _generator.caller_context = GluonCallerContext(num_warps=num_warps)
    try:
        return gl.warp_specialize(
            partitions, warps, registers, _semantic=_semantic, _generator=_generator
        )
    finally:
        _generator.caller_context = before


@gluon.jit
def unknown(x):
    """An int32 that the compiler knows nothing of: what depends on it is computed where it is used,
    and not ahead of a loop, where it would take registers all along."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _named(what, threads):
    return f"bar.{what} $1, {threads}; mov.b32 $0, 0;"


@gluon.constexpr_function
def _named_if(what, threads):
    live = ".reg .pred live; setp.ne.b32 live, $2, 0;"
    return "{ " + live + f" @live bar.{what} $1, {threads}; mov.b32 $0, 0; " + "}"


@gluon.jit
def signal(number, threads: gl.constexpr):
    """The threads of a partition pass a named barrier of the program, and go on. Each warp does so
    for itself; whoever meets there once `threads` have passed sees what they did before."""
    TEXT: gl.constexpr = _named("arrive", threads)
    gl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _at_named_if(live, number, WHAT: gl.constexpr, threads: gl.constexpr):
    TEXT: gl.constexpr = _named_if(WHAT, threads)
    live = live.to(gl.int32)
    gl.inline_asm_elementwise(TEXT, "=r,r,r", [number, live], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal_if(live, number, threads: gl.constexpr):
    _at_named_if(live, number, "arrive", threads)


@gluon.jit
def meet_if(live, number, threads: gl.constexpr):
    """A warp of its own waits at a named barrier until `threads` have passed, its own included."""
    _at_named_if(live, number, "sync", threads)


@gluon.jit
def exp2_fast(x):
    """2**x; results below 2**-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


_CHOSEN = gl.constexpr("""{
.reg .pred keep;
setp.ne.b32 keep, $2, 0;
selp.f32 $0, $1, $3, keep;
}""")


@gluon.jit
def chosen(keep, x, less: gl.constexpr):
    """x where all of several conditions hold, else `less`. Written as `where`, LLVM makes a
    selection for each of them; so the assembler joins them in the comparisons (Triton 3.6)."""
    keep = gl.where(keep, gl.full(x.shape, 1, gl.int32, x.type.layout), 0)
    less = gl.full(x.shape, less, gl.float32, x.type.layout)
    return gl.inline_asm_elementwise(
        _CHOSEN, "=f,f,r,f", [x, keep, less], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def meet(number, threads: gl.constexpr):
    """A partition waits at a named barrier until `threads` have passed, its own included."""
    TEXT: gl.constexpr = _named("sync", threads)
    gl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


def _times_unless_one() -> str:
    """For 32 elements of a thread, of two rows: pairs of either in turn."""
    N = 32
    copies = "".join(f"mov.f32 ${i}, ${N + i};\n" for i in range(N))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * N + i};\n" for i in range(N))
    return f"""{{
.reg .pred grew;
setp.neu.f32 grew, ${2 * N}, 0f3F800000;
setp.neu.or.f32 grew, ${2 * N + 2}, 0f3F800000, grew;
vote.sync.any.pred grew, grew, 0xffffffff;
{copies}@!grew bra DONE;
{products}DONE:
}}"""


_TIMES = gl.constexpr(_times_unless_one())
_TIMES_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 64))


@gluon.jit
def times_unless_one(x, factor):
    return gl.inline_asm_elementwise(
        _TIMES, _TIMES_CONSTRAINTS, [x, factor], dtype=gl.float32, is_pure=True, pack=32
    )
