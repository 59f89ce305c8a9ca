"""Comparisons of one position with what does not depend on it: where a mask begins and ends.

For the keys of a row, `q >= kv`, `q - kv < window` and `kv < prefix[b]` each say that kv is on one
side of an *edge*, a value of the row. A kernel may take the edges of its rows relative to the first
key of a tile, once a tile; its keys are literals beside them, and need no registers.

    comparison      kv <= X, kv >= X, kv == X or kv != X with X = sum of factor * node + constant
    and, or         edges of one direction become the nearer or the farther one, by min and max:
                    `(kv < prefix[b]) | (kv <= q)` is kv <= max(prefix[b] - 1, q)

Recognised: comparisons of integers that are linear in the position with a factor of 1 or -1; the
rest, `nodes`, may be anything that does not depend on it. Not recognised: a position under
division, remainder, min or max, or within a reduction.

Exact: nodes that are looked through surely do not wrap where positions lie within +-reach, numbers
fit 32 bits and captured 64-bit integers of the slots `narrow` are within +-2^29; and X may be
computed in 32 bits, also less a position. One node that is known to no such bound may be CLAMPED to
+-2^30, since what else X has is smaller: it is beyond all keys, on the same side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnloom.ir.interval import INT_LIMITS
from attnloom.ir.node import Axes, DType, Node, Program
from attnloom.ir.passes.bounds import integer_reach

CLAMP = 1 << 30
_ROOM = 1 << 23  # for positions and what is taken from them
_INVERSE = {"le": "gt", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRROR = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_R_AXES = Axes.R0 | Axes.R1 | Axes.R2 | Axes.R3


@dataclass(frozen=True, slots=True)
class Linear:
    """terms: (factor, node). clamped: the node that is to be clamped, or -1."""

    terms: tuple[tuple[int, int], ...]
    constant: int
    clamped: int = -1


@dataclass(frozen=True, slots=True)
class Extremum:
    """The min or max of two values or more."""

    how: str
    values: tuple[Value, ...]


Value = Linear | Extremum


@dataclass(frozen=True, slots=True)
class Edge:
    """position `side` value; side: le, ge, eq or ne."""

    side: str
    value: Value

    def nodes(self) -> tuple[int, ...]:
        return _nodes(self.value)


@dataclass(frozen=True, slots=True)
class Join:
    """and / or of edges and of BOOL nodes that are none."""

    how: str
    parts: tuple[Edge | int, ...]

    def nodes(self) -> tuple[int, ...]:
        return tuple(i for p in self.parts for i in (p.nodes() if isinstance(p, Edge) else (p,)))


Form = Edge | Join


def _nodes(value: Value) -> tuple[int, ...]:
    if isinstance(value, Linear):
        return tuple(node for _, node in value.terms)
    return tuple(node for v in value.values for node in _nodes(v))


@functools.lru_cache(maxsize=1024)
def edges(program: Program, along: Axes, reach: int, narrow: frozenset[int]) -> dict[int, Form]:
    """BOOL nodes with an edge in them, whose forms are equal to them.

    Args:
        along: the position that edges are for, Axes.Q or Axes.KV.
        reach, narrow: see the module; reach is at most 2^21.
    """
    found = _Edges(program, along, integer_reach(program, reach, narrow))
    for i in range(len(program.nodes)):
        found.visit(i)
    return found.forms


class _Edges:
    """The forms of nodes, in their order."""

    def __init__(self, program: Program, along: Axes, reach: tuple[int, ...]) -> None:
        self.program, self.along, self.reach = program, along, reach
        self.forms: dict[int, Form] = {}

    def visit(self, i: int) -> None:
        node = self.program.nodes[i]
        if node.dtype is not DType.BOOL or self.program.axes[i] & _R_AXES:
            return
        form: Form | None = None
        if node.op in _MIRROR:
            form = self._compared(node.op, *node.args)
        elif node.op == "not":
            inner = self.forms.get(node.args[0])
            if isinstance(inner, Edge):
                form = _edge(_INVERSE[inner.side], inner.value)
        elif node.op in ("and", "or"):
            form = self._joined(node.op, node.args)
        if form is not None:
            self.forms[i] = form

    def _compared(self, op: str, a: int, b: int) -> Edge | None:
        if not self.program.nodes[a].dtype.is_int:
            return None
        left, right = self._linear(a), self._linear(b)
        if left is None or right is None:
            return None
        terms, constant = dict(left[1]), left[2] - right[2]
        for node, factor in right[1].items():
            terms[node] = terms.get(node, 0) - factor
        factor = left[0] - right[0]
        if abs(factor) != 1:
            return None
        rest = tuple((-factor * f, node) for node, f in sorted(terms.items()) if f)
        value = self._bounded(rest, -factor * constant)
        return None if value is None else _edge(op if factor == 1 else _MIRROR[op], value)

    def _linear(self, i: int) -> tuple[int, dict[int, int], int] | None:
        """(factor of the position, factors of nodes, constant)."""
        node = self.program.nodes[i]
        if not self.program.axes[i] & self.along:
            if node.op == "const":
                return 0, {}, int(str(node.attr))
            return 0, {i: 1}, 0
        if node.op == "input":
            return 1, {}, 0
        if node.op not in _RULES or self.reach[i] > INT_LIMITS[node.dtype][1]:
            return None
        if node.op == "cast" and not _is_position(self.program, node):
            return None
        args = [self._linear(a) for a in node.args]
        if any(a is None for a in args):
            return None
        return _RULES[node.op](*args)

    def _bounded(self, terms: tuple[tuple[int, int], ...], constant: int) -> Linear | None:
        """X, if it fits 32 bits with room for positions."""
        sizes = [abs(factor) * self.reach[node] for factor, node in terms]
        total = sum(sizes) + abs(constant)
        if total <= 2 * CLAMP - _ROOM:
            return Linear(terms, constant)
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=-1)
        if largest < 0 or abs(terms[largest][0]) != 1:
            return None
        if total - sizes[largest] > CLAMP - _ROOM:
            return None
        return Linear(terms, constant, terms[largest][1])

    def _joined(self, how: str, args: tuple[int, ...]) -> Form | None:
        parts: list[Edge | int] = []
        for arg in args:
            form = self.forms.get(arg)
            if isinstance(form, Join) and form.how == how:
                parts += form.parts
            else:
                parts.append(arg if form is None or isinstance(form, Join) else form)
        if not any(isinstance(part, Edge) for part in parts):
            return None
        for side in ("le", "ge"):
            nearer = "min" if (side == "le") == (how == "and") else "max"
            parts = _merged(parts, side, nearer)
        only = parts[0]
        return only if len(parts) == 1 and isinstance(only, Edge) else Join(how, tuple(parts))


def _is_position(program: Program, node: Node) -> bool:
    """Whether a cast is of q or kv itself, to a type that holds it."""
    return program.nodes[node.args[0]].op == "input" and node.dtype in (DType.I32, DType.I64)


def _edge(op: str, value: Value) -> Edge:
    if op == "lt":
        return Edge("le", _plus(value, -1))
    return Edge("ge", _plus(value, 1)) if op == "gt" else Edge(op, value)


def _plus(value: Value, number: int) -> Value:
    if isinstance(value, Linear):
        return Linear(value.terms, value.constant + number, value.clamped)
    return Extremum(value.how, tuple(_plus(v, number) for v in value.values))


def _merged(parts: list[Edge | int], side: str, how: str) -> list[Edge | int]:
    """Edges of one side as one, in the place of the first."""
    values: list[Value] = []
    first = -1
    rest: list[Edge | int] = []
    for part in parts:
        if not isinstance(part, Edge) or part.side != side:
            rest.append(part)
            continue
        if first < 0:
            first = len(rest)
        same = isinstance(part.value, Extremum) and part.value.how == how
        values += part.value.values if same else (part.value,)  # type: ignore[union-attr]
    if len(values) < 2:
        return parts
    rest.insert(first, Edge(side, Extremum(how, tuple(dict.fromkeys(values)))))
    return rest


_Sum = tuple[int, dict[int, int], int]


def _add(a: _Sum, b: _Sum) -> _Sum:
    terms = dict(a[1])
    for node, factor in b[1].items():
        terms[node] = terms.get(node, 0) + factor
    return a[0] + b[0], terms, a[2] + b[2]


def _times(a: _Sum, number: int) -> _Sum:
    return a[0] * number, {node: f * number for node, f in a[1].items()}, a[2] * number


def _mul(a: _Sum, b: _Sum) -> _Sum | None:
    for one, other in ((a, b), (b, a)):
        if not (one[0] or one[1]):
            return _times(other, one[2])
    return None


_RULES = {
    "add": _add,
    "sub": lambda a, b: _add(a, _times(b, -1)),
    "neg": lambda a: _times(a, -1),
    "mul": _mul,
    "cast": lambda a: a,
}
