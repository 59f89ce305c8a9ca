"""Emit what decides whole tiles of a mask: ranges of its one-sided parts, and intervals on them.

    rows_summary(args, b, h, at, q, table, step)
    columns_summary(args, b, h, at, kv, table, step)
        the range over a block of each part that depends on queries (keys) alone, into a table
    ranges(args, rows, row_step, row_at, columns, column_step, column_at, b, h, q0, q1, kv0, kv1)
        -> (surely, possibly), whether all and whether some scores are kept where queries are
        q0 .. q1 and keys kv0 .. kv1, given the tables' entries at row_at and column_at; all of b,
        h and the positions are vectors, one element a tile

Operations without a rule here, reductions among them, are unknown: such tiles stay open, and are
evaluated score by score with the fragments of emit.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnloom.backends.triton.emit import (
    TYPES,
    Target,
    Writer,
    arg_index,
    module_text,
    number_index,
)
from attnloom.ir.builder import extract
from attnloom.ir.interval import INT_LIMITS
from attnloom.ir.node import Axes, DType, Node, Program
from attnloom.masking.summaries import one_sided_nodes

_IMPORT = "from attnloom.backends.triton import interval_math as iv\n"
_ALL = Axes.B | Axes.H | Axes.Q | Axes.KV
_SHORT_REACH = 1 << 61
# Of a part that is computed in floats: a kernel may fuse its last product into what reads it.
_SLACK = {DType.F32: 2.0**-22, DType.F64: 2.0**-51}
_EXACT = ("load", "cast", "min", "max", "floor", "ceil", "round", "trunc", "neg", "abs")
_POSITIONS = {"b": "b, b", "h": "h, h", "q": "q0, q1", "kv": "kv0, kv1"}


@dataclass(frozen=True, slots=True)
class Sides:
    """Parts of a mask by side, in the order of their table: node indices."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @staticmethod
    def of(program: Program) -> Sides:
        found = one_sided_nodes(program)
        return Sides(*(tuple(i for i, s in found.items() if s == side) for side in ("q", "kv")))


def emit_ranges(program: Program, target: Target) -> str:
    """Text of the module of a mask program; summaries only for sides that have parts."""
    sides = Sides.of(program)
    parts = [_IMPORT]
    for side, nodes in (("rows", sides.rows), ("columns", sides.columns)):
        if nodes:
            part = extract(program, *nodes)
            parts.append(Writer(part, side, target).text(part.outputs, ""))
            parts.append(_summary(part, side))
    parts.append(_Ranges(program, sides).text())
    return module_text(*parts)


def _summary(part: Program, side: str) -> str:
    position, q, kv = ("q", "q", "0") if side == "rows" else ("kv", "0", "kv")
    lines = [
        f"head = {side}_head(args, b, h)",
        f"row = {side}_row(args, head, b, h, {q})",
        f"values = {side}_body(args, head, row, b, h, {q}, {kv})",
    ]
    single = len(part.outputs) == 1
    for i, output in enumerate(part.outputs):
        node = part.nodes[output]
        slack = 0.0 if node.op in _EXACT else _SLACK.get(node.dtype, 0.0)
        value = f"tl.cast({'values' if single else f'values[{i}]'}, {TYPES[node.dtype]})"
        lines.append(
            f"iv.keep(table, {i}, step, at, {position}, {value}, {node.dtype.is_float}, {slack!r})"
        )
    return _function(f"{side}_summary", f"args, b, h, at, {position}, table, step", lines)


def _function(name: str, params: str, lines: list[str]) -> str:
    return f"@triton.jit\ndef {name}({params}):\n" + "".join(f"    {line}\n" for line in lines)


class _Ranges:
    """Writes `ranges`: each value that is needed is a pair (l<node>, u<node>)."""

    def __init__(self, program: Program, sides: Sides) -> None:
        self.program = program
        self.places = {n: ("row", i) for i, n in enumerate(sides.rows)}
        self.places |= {n: ("column", i) for i, n in enumerate(sides.columns)}

    def text(self) -> str:
        (output,) = self.program.outputs
        lines = [f"l{i}, u{i} = {self.pair(i)}" for i in self.needed(output)]
        lines.append(f"return l{output}, u{output}")
        steps = "rows, row_step, row_at, columns, column_step, column_at"
        return _function("ranges", f"args, {steps}, b, h, q0, q1, kv0, kv1", lines)

    def needed(self, root: int) -> list[int]:
        found: set[int] = set()
        pending = [root]
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending += self.operands(i)
        return sorted(found)

    def operands(self, i: int) -> tuple[int, ...]:
        """Values that the pair of a node is computed from."""
        node = self.program.nodes[i]
        if i in self.places or self.rule(i) is None:
            return ()
        return node.args

    def pair(self, i: int) -> str:
        if i in self.places:
            side, place = self.places[i]
            kind = _kind(self.program.nodes[i].dtype)
            return f"iv.kept_{kind}({side}s, {place}, {side}_step, {side}_at)"
        rule = self.rule(i)
        return _UNKNOWN[_kind(self.program.nodes[i].dtype)] if rule is None else rule(self, i)

    def rule(self, i: int) -> _Rule | None:
        node = self.program.nodes[i]
        if node.op in _LEAVES:
            return _LEAVES[node.op]
        if node.op == "load":
            return None if self.program.axes[i] & ~_ALL else _load
        if node.op in ("shl", "shr", "and") and node.dtype is not DType.BOOL:
            return _BITS[node.op](self, node)
        operand = self.kinds(node)
        if operand is None or (node.op, operand) not in _CALLS:
            return None
        return _call

    def kinds(self, node: Node) -> str | None:
        """The kind of the operands; of a `where` or a `cast` see _CALLS."""
        if not node.args or node.op == "reduce":
            return None
        if node.op == "cast":
            return f"{_kind(self.program.nodes[node.args[0]].dtype)}-{_kind(node.dtype)}"
        return _kind(self.program.nodes[node.args[-1]].dtype)

    def names(self, args: tuple[int, ...]) -> str:
        return ", ".join(f"l{a}, u{a}" for a in args)

    def constant(self, i: int) -> int | None:
        node = self.program.nodes[i]
        return int(node.attr) if node.op == "const" else None  # type: ignore[call-overload]


_Rule = Callable[[_Ranges, int], str]


def _constant(lo: object, hi: object, dtype: str) -> str:
    return f"tl.full(kv0.shape, {lo}, {dtype}), tl.full(kv0.shape, {hi}, {dtype})"


_UNKNOWN = {
    "bool": _constant(0, 1, "tl.int1"),
    "int": _constant("-iv.WIDEST", "iv.WIDEST", "tl.int64"),
    "float": _constant("float('-inf')", "float('inf')", "tl.float64"),
}


def _kind(dtype: DType) -> str:
    return "float" if dtype.is_float else "bool" if dtype is DType.BOOL else "int"


def _limits(dtype: DType) -> str:
    least, most = INT_LIMITS[dtype]
    return f"{max(least, -_SHORT_REACH)}, {min(most, _SHORT_REACH)}"


def _input(writer: _Ranges, i: int) -> str:
    lo, hi = _POSITIONS[str(writer.program.nodes[i].attr)].split(", ")
    return f"tl.cast({lo}, tl.int64), tl.cast({hi}, tl.int64)"


def _const(writer: _Ranges, i: int) -> str:
    node = writer.program.nodes[i]
    kind, value = _kind(node.dtype), node.attr
    if kind == "bool":
        return _constant(int(bool(value)), int(bool(value)), "tl.int1")
    if kind == "int":
        whole = int(value)  # type: ignore[call-overload]
        if abs(whole) >= _SHORT_REACH:
            return _UNKNOWN["int"]
        return _constant(whole, whole, "tl.int64")
    number = float(value)  # type: ignore[arg-type]
    with np.errstate(over="ignore"):
        held = float(np.float32(number)) if node.dtype is DType.F32 else number
    if not math.isfinite(held):
        return _UNKNOWN["float"]
    return _constant(*sorted((number, held)), "tl.float64")


def _number(writer: _Ranges, i: int) -> str:
    node = writer.program.nodes[i]
    at = number_index(writer.program, int(node.attr))  # type: ignore[call-overload]
    if not node.dtype.is_float:
        value = f"tl.full(kv0.shape, dm.whole(args, {at}), tl.int64)"
        return f"iv.integer({value}, {value}, False, -iv.WIDEST, iv.WIDEST)"
    number = f"args[{at}]" if node.dtype is DType.F32 else f"dm.double(args, {at})"
    value = f"tl.full(kv0.shape, {number}, tl.float64)"
    return f"iv.spread({value}, {value}, False)"


_LEAVES: dict[str, _Rule] = {"input": _input, "const": _const, "number": _number}


def _load(writer: _Ranges, i: int) -> str:
    """The element where its index is a single value."""
    node = writer.program.nodes[i]
    slot = int(node.attr)  # type: ignore[call-overload]
    base, rank = arg_index(writer.program, slot), writer.program.tensors[slot].rank
    single = " & ".join(f"(l{a} == u{a})" for a in node.args)
    offset = "".join(
        f" + dm.clamp_index(l{a}, dm.whole(args, {base + 1 + 3 * d}))"
        f" * dm.whole(args, {base + 1 + 3 * (rank + d)})"
        for d, a in enumerate(node.args)
    )
    kind = _kind(node.dtype)
    name = "element" if kind == "int" else f"element_{kind}"
    value = f"tl.load(args[{base}]{offset}).to({TYPES[node.dtype]})"
    return f"iv.{name}({single}, {value})"


def _call(writer: _Ranges, i: int) -> str:
    node = writer.program.nodes[i]
    operand = writer.kinds(node)
    assert operand is not None
    return _CALLS[node.op, operand].format(
        *(f"l{a}, u{a}" for a in node.args),
        all=writer.names(node.args),
        limits=_limits(node.dtype) if node.dtype.is_int else "",
        double=node.dtype is DType.F64,
        **{f"l{n}": f"l{a}" for n, a in enumerate(node.args)},
        **{f"u{n}": f"u{a}" for n, a in enumerate(node.args)},
    )


def _left(writer: _Ranges, node: Node) -> _Rule | None:
    count = writer.constant(node.args[1])
    if count is None or not 0 <= count < 60:
        return None
    power = f"tl.full(kv0.shape, {1 << count}, tl.int64)"
    a = node.args[0]
    return lambda *_: f"iv.mul(l{a}, u{a}, {power}, {power}, {_limits(node.dtype)})"


def _right(writer: _Ranges, node: Node) -> _Rule | None:
    count = writer.constant(node.args[1])
    if count is None or not 0 <= count < 63:
        return None
    a = node.args[0]
    return lambda *_: f"iv.shift_right(l{a}, u{a}, {count}, {_limits(node.dtype)})"


def _and(writer: _Ranges, node: Node) -> _Rule | None:
    a, b = node.args
    bits = writer.constant(b)
    if bits is not None and 0 < bits < 2**32 and bits & (bits + 1) == 0:
        power = f"tl.full(kv0.shape, {bits + 1}, tl.int64)"
        return lambda *_: f"iv.mod(l{a}, u{a}, {power}, {power}, {_limits(node.dtype)})"
    return lambda *_: f"iv.bit_and(l{a}, u{a}, l{b}, u{b}, {_limits(node.dtype)})"


_BITS: dict[str, Callable[[_Ranges, Node], _Rule | None]] = {
    "shl": _left,
    "shr": _right,
    "and": _and,
}

# (operation, kind of its operands) -> expression of pairs. {0}, {1}: the operands' pairs, {l0} and
# {u0} their ends, {all} all of them.
_CALLS: dict[tuple[str, str], str] = {
    ("and", "bool"): "{l0} & {l1}, {u0} & {u1}",
    ("or", "bool"): "{l0} | {l1}, {u0} | {u1}",
    ("not", "bool"): "~{u0}, ~{l0}",
    ("xor", "bool"): "({l0} & ~{u1}) | (~{u0} & {l1}), ({u0} & ~{l1}) | (~{l0} & {u1})",
    ("eq", "bool"): "({l0} & {l1}) | (~{u0} & ~{u1}), ({u0} & {u1}) | (~{l0} & ~{l1})",
    ("ne", "bool"): "({l0} & ~{u1}) | (~{u0} & {l1}), ({u0} & ~{l1}) | (~{l0} & {u1})",
    ("where", "bool"): "iv.select_bool({all})",
    ("where", "int"): "iv.select({all})",
    ("where", "float"): "iv.select({all})",
    ("lt", "int"): "iv.lt({all})",
    ("le", "int"): "iv.le({all})",
    ("gt", "int"): "iv.lt({1}, {0})",
    ("ge", "int"): "iv.le({1}, {0})",
    ("eq", "int"): "iv.eq({all})",
    ("ne", "int"): "iv.ne({all})",
    ("lt", "float"): "iv.flt({all})",
    ("le", "float"): "iv.fle({all})",
    ("gt", "float"): "iv.flt({1}, {0})",
    ("ge", "float"): "iv.fle({1}, {0})",
    ("eq", "float"): "iv.feq({all})",
    ("ne", "float"): "iv.ne({all})",
    ("cast", "bool-bool"): "{0}",
    ("cast", "bool-int"): "{l0}.to(tl.int64), {u0}.to(tl.int64)",
    ("cast", "bool-float"): "{l0}.to(tl.float64), {u0}.to(tl.float64)",
    ("cast", "int-bool"): "iv.truth({0})",
    ("cast", "float-bool"): "iv.truth({0})",
    ("cast", "int-int"): "iv.integer({0}, False, {limits})",
    ("cast", "int-float"): "iv.int_to_float({0}, {double})",
    ("cast", "float-int"): "iv.float_to_int({0}, {limits})",
    ("cast", "float-float"): "iv.outward({0}, False, {double})",
    ("neg", "float"): "iv.fneg({0})",
    ("abs", "float"): "iv.fabs({0})",
    ("min", "float"): "iv.fmin({all})",
    ("max", "float"): "iv.fmax({all})",
    ("floor", "float"): "iv.ffloor({0})",
    ("ceil", "float"): "iv.fceil({0})",
    ("floor", "int"): "{0}",
    ("ceil", "int"): "{0}",
    ("round", "int"): "{0}",
    ("trunc", "int"): "{0}",
}
_INTEGER = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "neg": "neg",
    "abs": "absolute",
    "min": "minimum",
    "max": "maximum",
    "floordiv": "floordiv",
    "truncdiv": "truncdiv",
    "mod": "mod",
}
_CALLS |= {(op, "int"): f"iv.{name}({{all}}, {{limits}})" for op, name in _INTEGER.items()}
_CALLS |= {(op, "float"): f"iv.f{op}({{all}}, {{double}})" for op in ("add", "sub", "mul", "div")}
