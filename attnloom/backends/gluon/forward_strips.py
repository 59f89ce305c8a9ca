"""Steps of 96 keys: scores, weights and output in strips of 16 columns.

Triton's tiles are powers of two, and so would be the keys of a step: 64 of 192 columns leave the
products little to do for what they read, 128 of them leave no room for two steps in shared memory.
Both products are `wgmma` written out, as in forward_wide.py, between operands whose addresses are
looked for when a program begins. Of a thread's registers of an instruction's result each eight are
16 columns; tensors of 16 columns in the layout of products, one after the other, are those.

Keys and values lie in panels of 64 columns side by side, each copied BOX rows at a time
(forward_boxes.py), so that a step need not be in one block of a mask.

Glossary: forward_shared.py. strips: a tuple of [ROWS, 16].
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from attnloom.backends.gluon.builtins import chosen, exp2_fast
from attnloom.backends.gluon.forward_boxes import rows_of

STRIP = gl.constexpr(16)
_HELD = gl.constexpr(8)  # registers of a thread
_PANEL_ROW = 128  # bytes of a panel's row
PANEL_ROW = gl.constexpr(_PANEL_ROW)
_EIGHT_ROWS = (8 * _PANEL_ROW >> 4) | (1 << 30)  # to the next eight; swizzled over 128 bytes


@builtin
def _by_strip(
    text: Any, constraints: Any, values: Any, count: Any, dtype: Any, pure: Any,
    _semantic: Any = None,
) -> Any:  # fmt: skip
    """A tuple of `count` strips, out of assembly that has a thread's part of each at once."""
    kinds = (_unwrap_if_constexpr(dtype),) * _unwrap_if_constexpr(count)
    found = gl.inline_asm_elementwise(
        text, constraints, list(values), dtype=kinds, is_pure=_unwrap_if_constexpr(pure),
        pack=_HELD.value, _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(list(found))


@builtin
def waited(pending: Any, values: Any, _semantic: Any = None) -> Any:
    """Strips, once at most so many products are in flight."""
    found = warpgroup_mma_wait(pending, list(values), _semantic=_semantic)
    return gl.tuple(list(found))


@builtin
def both_waited(left: Any, right: Any, _semantic: Any = None) -> Any:
    """The same of two tuples, once all products are done."""
    values = [*left, *right]
    found = list(warpgroup_mma_wait(0, values, _semantic=_semantic))
    count = len(list(left))
    return gl.tuple([gl.tuple(found[:count]), gl.tuple(found[count:])])


@gluon.constexpr_function
def _scores_text(keys, depth, half, rows):
    """q . k^T: $count and the eighth after it are addresses of q and k. rows: of a panel of q."""
    count = keys // 2
    result = ", ".join(f"${i}" for i in range(count))
    lines = [
        "{ .reg .b32 low; .reg .b64 a, b, at, bt;",
        "wgmma.fence.sync.aligned;",
        f"shr.u32 low, ${count}, 4; or.b32 low, low, {1 << 16}; mov.b64 a, {{low, {_EIGHT_ROWS}}};",
        f"shr.u32 low, ${count + 8}, 4; or.b32 low, low, {1 << 16}; "
        f"mov.b64 b, {{low, {_EIGHT_ROWS}}};",
    ]
    for column in range(0, depth, 16):
        panel, rest = divmod(column, 64)
        left = panel * rows * _PANEL_ROW + rest * 2
        right = panel * keys * _PANEL_ROW + rest * 2
        lines.append(
            f"add.s64 at, a, {left >> 4}; add.s64 bt, b, {right >> 4};"
            f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{half}.{half} {{{result}}}, "
            f"at, bt, {int(column > 0)}, 1, 1, 0, 0;"
        )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _scores_constraints(keys):
    return ",".join(["=f"] * (keys // 2) + ["r"] * 16)


@gluon.constexpr_function
def _name(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def scores_by_strip(q_at, k_at, L: gl.constexpr, cfg: gl.constexpr):
    """q . k^T of a step in flight, as one group. q_at, k_at: addresses."""
    HALF: gl.constexpr = _name(cfg.OPERAND)
    TEXT: gl.constexpr = _scores_text(cfg.TILE_N, cfg.DEPTH, HALF, cfg.ROWS)
    CONSTRAINTS: gl.constexpr = _scores_constraints(cfg.TILE_N)
    q_all = gl.full([cfg.ROWS, STRIP], q_at, gl.int32, L)
    if cfg.WARPS == 8:
        # the second four warps multiply the lower half of a panel
        row = gl.arange(0, cfg.ROWS, gl.SliceLayout(1, L))
        q_all = q_all + (row // 64 * (64 * PANEL_ROW))[:, None]
    k_all = gl.full([cfg.ROWS, STRIP], k_at, gl.int32, L)
    return _by_strip(TEXT, CONSTRAINTS, (q_all, k_all), cfg.TILE_N // STRIP, gl.float32, False)


@gluon.constexpr_function
def _output_text(keys, columns, half):
    """acc += p . v: the accumulator, out; the address; the weights."""
    count = columns // 2
    address, first = count, count + 8
    accumulator = ", ".join(f"${i}" for i in range(count))
    panel = keys * _PANEL_ROW >> 4  # of 64 columns to the next 64
    lines = [
        "{ .reg .b32 low; .reg .b64 from;",
        "wgmma.fence.sync.aligned;",
        f"shr.u32 low, ${address}, 4; or.b32 low, low, {panel << 16};",
        f"mov.b64 from, {{low, {_EIGHT_ROWS}}};",
    ]
    for i in range(keys // 16):
        operand = ", ".join(f"${first + 4 * i + j}" for j in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} "
            f"{{{accumulator}}}, {{{operand}}}, from, 1, 1, 1, 1;"
        )
        if i + 1 < keys // 16:
            lines.append(f"add.u64 from, from, {16 * _PANEL_ROW >> 4};")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def _output_constraints(keys, columns):
    count = columns // 2
    taken = ["r"] * (8 + keys // 4) + [str(i) for i in range(count)]
    return ",".join(["=f"] * count + taken)


@gluon.jit
def add_by_strip(p, address, acc, cfg: gl.constexpr):
    """acc + p . v in flight, as one group. p: strips of 16 bits; address: of v."""
    HALF: gl.constexpr = _name(cfg.OPERAND)
    COLUMNS: gl.constexpr = cfg.PARTS * cfg.PART
    TEXT: gl.constexpr = _output_text(cfg.TILE_N, COLUMNS, HALF)
    CONSTRAINTS: gl.constexpr = _output_constraints(cfg.TILE_N, COLUMNS)
    return _by_strip(TEXT, CONSTRAINTS, (address,) + p + acc, COLUMNS // STRIP, gl.float32, False)  # noqa: RUF005


@gluon.constexpr_function
def _times_text(count):
    """Eight factors behind the results, those of two rows: pairs of either in turn."""
    lines = [
        "{ .reg .pred grew;",
        f"setp.neu.f32 grew, ${count}, 0f3F800000;",
        f"setp.neu.or.f32 grew, ${count + 2}, 0f3F800000, grew;",
        "vote.sync.any.pred grew, grew, 0xffffffff;",
        "@!grew bra DONE;",
    ]
    products = [f"mul.f32 ${i}, ${i}, ${count + i % 8};" for i in range(count)]
    return "\n".join([*lines, *products, "DONE:", "}"])


@gluon.constexpr_function
def _times_constraints(count):
    return ",".join(["=f"] * count + ["f"] * 8 + [str(i) for i in range(count)])


@gluon.jit
def strips_times(acc, alpha, L: gl.constexpr):
    """Rows multiplied by a vector of queries; no warp multiplies by ones."""
    COUNT: gl.constexpr = len(acc) * _HELD
    TEXT: gl.constexpr = _times_text(COUNT)
    CONSTRAINTS: gl.constexpr = _times_constraints(COUNT)
    factor = alpha[:, None] + gl.zeros([alpha.shape[0], STRIP], gl.float32, L)
    return _by_strip(TEXT, CONSTRAINTS, (factor,) + acc, len(acc), gl.float32, True)  # noqa: RUF005


@gluon.jit
def no_strips(L: gl.constexpr, cfg: gl.constexpr):
    """Of the output."""
    zero = gl.zeros([cfg.ROWS, STRIP], gl.float32, L)
    COUNT: gl.constexpr = cfg.PARTS * cfg.PART // STRIP
    found = ()
    for _ in gl.static_range(COUNT):
        found += (zero,)
    return found


@gluon.jit
def strips_if(live, acc):
    found = ()
    for i in gl.static_range(len(acc)):
        found += (gl.where(live, acc[i], 0.0),)
    return found


@gluon.jit
def _strip_if(s, keep, JOINS: gl.constexpr):
    if JOINS:
        return chosen(keep, s, float("-inf"))
    else:
        return gl.where(keep, s, float("-inf"))


@gluon.jit
def _keep(context, edges, q, kv, place, limit, LIMITED: gl.constexpr, cfg: gl.constexpr):
    """What the mask keeps of a strip. kv: its positions; place: its columns in their box."""
    if cfg.HAS_MASK:
        b, h, _, _, mask, _ = context
        args, head, row = mask
        column = cfg.MASK_COLUMN(args, head, b, h, kv)
        return cfg.MASK_BODY(args, head, row, column, edges, b, h, q, kv, place, 1, LIMITED)
    else:
        return (place <= limit)[None, :]


@gluon.jit
def masked_strips(s, context, mem, n, at, L: gl.constexpr, cfg: gl.constexpr):
    """-inf where the mask is false and past the last key. n, at: see forward_sm90.consume."""
    LIMITED: gl.constexpr = cfg.HAS_TAIL or cfg.HAS_LISTS
    JOINS: gl.constexpr = cfg.HAS_MASK and cfg.MASK_JOINS
    A_BOX: gl.constexpr = cfg.BOX // STRIP
    b, h, queries, _, mask, _ = context
    q = queries + at[0]
    rows = rows_of(mem, n, cfg)
    found = ()
    for j in gl.static_range(len(s) // A_BOX):
        limit = at[2] - 1 - rows[j]
        first = rows[j] + at[1]
        edges = (0,)
        if cfg.HAS_MASK:
            args, head, row = mask
            edges = cfg.MASK_EDGES(args, head, row, b, h, q, first, limit, LIMITED)
        for i in gl.static_range(A_BOX):
            place = i * STRIP + gl.arange(0, STRIP, gl.SliceLayout(0, L))
            keep = _keep(context, edges, q, first + place, place, limit, LIMITED, cfg)
            found += (_strip_if(s[j * A_BOX + i], keep, JOINS),)
    return found


@gluon.jit
def strips_scaled(s, factor):
    found = ()
    for i in gl.static_range(len(s)):
        found += (s[i] * factor,)
    return found


@gluon.jit
def strips_max(s, L: gl.constexpr):
    """Of rows."""
    most = s[0]
    for i in gl.static_range(1, len(s)):
        most = gl.maximum(most, s[i])
    return gl.convert_layout(gl.max(most, 1), gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit
def strips_exp(s, shift, base):
    """(weights, their sums by place in a strip)."""
    one = exp2_fast(s[0] * base - shift)
    found, total = (one,), one
    for i in gl.static_range(1, len(s)):
        one = exp2_fast(s[i] * base - shift)
        found += (one,)
        total = total + one
    return found, total


_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_PAIR_OF_HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def _pairs(x, cfg: gl.constexpr):
    HOW: gl.constexpr = _PAIR if gl.bfloat16 == cfg.OPERAND else _PAIR_OF_HALVES
    left, right = x.reshape([cfg.ROWS, STRIP // 2, 2]).split()
    return gl.inline_asm_elementwise(
        HOW, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def packed_strips(x, cfg: gl.constexpr):
    """Pairs of columns in one register."""
    found = ()
    for i in gl.static_range(len(x)):
        found += (_pairs(x[i], cfg),)
    return found


@gluon.jit
def _whole(x, L: gl.constexpr, cfg: gl.constexpr):
    left = x.to(gl.int16).to(cfg.OPERAND, bitcast=True)
    right = (x >> 16).to(gl.int16).to(cfg.OPERAND, bitcast=True)
    whole = gl.join(left, right).reshape([cfg.ROWS, STRIP])
    return gl.convert_layout(whole, L, assert_trivial=True)


@gluon.jit
def unpacked_strips(x, L: gl.constexpr, cfg: gl.constexpr):
    found = ()
    for i in gl.static_range(len(x)):
        found += (_whole(x[i], L, cfg),)
    return found


@gluon.jit
def _beside(x, OUT: gl.constexpr):
    """Strips side by side, as one tensor of OUT."""
    M: gl.constexpr = x[0].shape[0]
    N: gl.constexpr = x[0].shape[1]
    if len(x) == 1:
        return gl.convert_layout(x[0], OUT, assert_trivial=True)
    else:
        found = ()
        for i in gl.static_range(0, len(x), 2):
            found += (gl.join(x[i], x[i + 1]).permute(0, 2, 1).reshape([M, 2 * N]),)
        return _beside(found, OUT)


@gluon.jit
def three_parts(acc, OUT: gl.constexpr):
    """The output as forward_wide.py has it, in layout OUT."""
    N: gl.constexpr = len(acc) // 3
    return _beside(acc[0:N], OUT), _beside(acc[N : 2 * N], OUT), _beside(acc[2 * N :], OUT)
