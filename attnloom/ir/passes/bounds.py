"""What a program's values can be on whole tiles at once, by interval arithmetic.

Given the range of each input on each tile, `bounds` returns for each tile a range that surely
contains the output at every position of the tile. For a mask that decides tiles: certainly true is
full, not possibly true is empty, the rest needs a closer look.

Tight, so that a tile is left undecided only if it is mixed: comparisons of a query-side value with
a key-side value, of their sum or difference with a constant, `doc[q] == doc[kv]` where each side's
range is known exactly (an override), and conjunctions and disjunctions of such that do not
contradict each other. Loose where one position occurs twice in ways that cancel: operands are
treated as independent.

Captured tensors that are read by a joint index have the range of the whole tensor; it is not
computed for tensors above _MAX_SCANNED elements, whose values count as unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch

from attnloom.ir.interval import Interval, between, constant, integer, outward, point, unknown
from attnloom.ir.node import REDUCTION_AXES, BoundProgram, DType, Node, Program
from attnloom.ir.ops import OPS

Tensor = torch.Tensor
Range = tuple[Tensor, Tensor]
_MAX_SCANNED = 1 << 16
_NARROW = 2**29  # what CPU kernels accept of a captured integer in 32-bit lanes
_INT32 = 2**31 - 1
_POSITIONS = ("b", "h", "q", "kv")


def bounds(
    bound: BoundProgram,
    inputs: Mapping[str, Range],
    overrides: Mapping[int, Range] | None = None,
) -> Range:
    """Range of the only output of a program.

    Args:
        bound: program and bindings.
        inputs: (lo, hi) of each input, both included; int64 tensors that broadcast, for instance
            [R, 1] for the rows of tiles and [1, C] for the columns. `score` may be left out.
        overrides: (lo, hi) of nodes by index, where they are known better; what only such nodes
            need is not looked at.
    Returns:
        (lo, hi) that broadcast: bool (certainly true, possibly true), int64 or float64. A float
        that may be NaN has the range (-inf, inf).
    Raises:
        KeyError: an input that is needed has no range.
    """
    (output,) = bound.program.outputs
    found = node_intervals(bound, inputs, overrides)[output]
    return found.lo, found.hi


def node_intervals(
    bound: BoundProgram,
    inputs: Mapping[str, Range],
    overrides: Mapping[int, Range] | None = None,
    nodes: Iterable[int] | None = None,
) -> dict[int, Interval]:
    """Intervals of these nodes (all outputs if None) and of all that they need; see `bounds`."""
    program = bound.program
    roots = program.outputs if nodes is None else nodes
    walk = _Walk(bound, inputs, overrides or {}, lambda slot: _scanned(bound.tensors[slot]))
    for index in _needed(bound, roots, walk.overrides):
        walk.visit(index)
    return walk.found


def fits_32_bits(bound: BoundProgram, inputs: Mapping[str, tuple[int, int]]) -> bool:
    """Whether every integer of a program can be computed in 32-bit lanes.

    Captured integers count as within +-2^29 (kernels check that as they load), numbers have their
    values. Casts of floats count likewise: beyond 32 bits their result is undefined anyway.

    Args:
        inputs: smallest and largest value of b, h, q and kv.
    """
    program = bound.program
    ranges = {name: (constant(lo), constant(hi)) for name, (lo, hi) in inputs.items()}
    overrides = {
        index: _narrow()
        for index, node in enumerate(program.nodes)
        if node.op == "cast" and node.dtype is DType.I64 and _source(bound, node).is_float
    }
    walk = _Walk(bound, ranges, overrides, lambda slot: _assumed(bound, slot))
    for index, node in enumerate(program.nodes):
        found = walk.visit(index)
        if node.dtype is DType.I64 and max(-int(found.lo.min()) - 1, int(found.hi.max())) > _INT32:
            return False
    return True


@functools.lru_cache(maxsize=1024)
def small_integers(program: Program, reach: int, limit: int) -> frozenset[int]:
    """Integer nodes that surely lie within +-limit where b, h and positions lie within +-reach.

    Captured elements, numbers and steps of reductions count as unknown.
    """
    found = _reaches(program, reach, lambda node: unknown(node.dtype))
    return frozenset(i for i, least in enumerate(found) if least is not None and least <= limit)


@functools.lru_cache(maxsize=1024)
def integer_reach(program: Program, reach: int, narrow: frozenset[int]) -> tuple[int, ...]:
    """The largest magnitude of each integer node, where b, h and positions lie within +-reach; of
    others 0. What may wrap has one that a signed type does not have.

    Numbers count as of 32 bits, captured 64-bit integers of the slots `narrow` as within +-2^29.
    """

    def interval(node: Node) -> Interval:
        if node.op == "number" and node.dtype is DType.I64:
            return unknown(DType.I32)
        if node.op == "load" and node.dtype is DType.I64 and node.attr in narrow:
            return between(*_narrow(), DType.I64)
        return unknown(node.dtype)

    return tuple(least or 0 for least in _reaches(program, reach, interval))


@functools.lru_cache(maxsize=1024)
def stays_within(program: Program, limit: float, score: float, reach: int) -> bool:
    """Whether the output, a float, surely lies within +-limit where the score does within +-score
    and b, h and positions within +-reach. Captured elements and numbers count as unknown."""
    found = _intervals(program, reach, lambda node: unknown(node.dtype), score)
    return all(
        float(found[i].lo.min()) >= -limit and float(found[i].hi.max()) <= limit
        for i in program.outputs
    )


def _reaches(
    program: Program, reach: int, given: Callable[[Node], Interval]
) -> tuple[int | None, ...]:
    """As `integer_reach`, None for what is no integer. given: of loads, numbers and reductions."""
    intervals = _intervals(program, reach, given)
    found: list[int | None] = []
    for node, interval in zip(program.nodes, intervals, strict=True):
        ends_of = (-int(interval.lo.min()), int(interval.hi.max())) if node.dtype.is_int else ()
        found.append(max(ends_of, default=None))
    return tuple(found)


def _intervals(
    program: Program, reach: int, given: Callable[[Node], Interval], score: float | None = None
) -> list[Interval]:
    """Of each node, where b, h and positions lie within +-reach and the score within +-score."""
    ends = (constant(-reach), constant(reach))
    overrides: dict[int, Range] = {}
    for index, node in enumerate(program.nodes):
        if node.op in ("load", "number", "reduce"):
            interval = given(node)
            overrides[index] = interval.lo, interval.hi
        elif node.op == "input" and node.dtype.is_int:
            overrides[index] = ends if str(node.attr) in _POSITIONS else _narrow()
        elif node.op == "input" and score is not None:
            overrides[index] = constant(-score), constant(score)
    walk = _Walk(BoundProgram(program), {}, overrides, lambda _: unknown(DType.I64))
    return [walk.visit(index) for index in range(len(program.nodes))]


class _Walk:
    """One evaluation in node order. captured: interval of a captured tensor's elements."""

    def __init__(
        self,
        bound: BoundProgram,
        inputs: Mapping[str, Range],
        overrides: Mapping[int, Range],
        captured: Callable[[int], Interval],
    ) -> None:
        self.bound, self.inputs, self.overrides = bound, inputs, overrides
        self.captured = captured
        self.found: dict[int, Interval] = {}

    def visit(self, index: int) -> Interval:
        node = self.bound.program.nodes[index]
        if index in self.overrides:
            found = between(*self.overrides[index], node.dtype)
        elif node.op in _LEAVES:
            found = _LEAVES[node.op](self, node)
        else:
            args = tuple(self.found[a] for a in node.args)
            found = OPS[node.op].interval(args, node.dtype)
        self.found[index] = found
        return found

    def length(self, axis: int) -> int:
        slot, dim = self.bound.program.reductions[axis]
        return self.bound.tensors[slot].shape[dim]


def _needed(bound: BoundProgram, roots: Iterable[int], overrides: Mapping[int, Range]) -> list[int]:
    needed: set[int] = set()
    pending = list(roots)
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            if index not in overrides:
                pending += bound.program.nodes[index].args
    return sorted(needed)


def _input(walk: _Walk, node: Node) -> Interval:
    name = str(node.attr)
    if name[0] == "r":
        last = max(walk.length(int(name[1:])) - 1, 0)
        return Interval(constant(0), constant(last), last)
    if name in walk.inputs:
        return between(*walk.inputs[name], node.dtype)
    if node.dtype.is_float:
        return unknown(node.dtype)
    raise KeyError(name)


def _reduce(walk: _Walk, node: Node) -> Interval:
    kind, axis = node.attr  # type: ignore[misc]
    body, steps = walk.found[node.args[0]], walk.length(REDUCTION_AXES.index(axis))
    if kind in ("any", "all"):
        return body if steps else point(kind == "all", DType.BOOL)
    if steps == 0 or kind == "prod":
        return unknown(node.dtype)
    if kind != "sum":
        return body
    lo, hi = body.lo * steps, body.hi * steps
    if not node.dtype.is_float:
        return integer(lo, hi, body.reach * steps, node.dtype)
    # Each addition rounds; partial sums are at most `steps` times the largest element.
    slack = torch.maximum(-lo, hi) * steps * 2.0**-23
    return outward(lo - slack, hi + slack, node.dtype, body)


_LEAVES: dict[str, Callable[[_Walk, Node], Interval]] = {
    "input": _input,
    "const": lambda _, node: point(node.attr, node.dtype),  # type: ignore[arg-type]
    "number": lambda walk, node: point(walk.bound.numbers[node.attr], node.dtype),  # type: ignore[index]
    "load": lambda walk, node: walk.captured(int(str(node.attr))),
    "reduce": _reduce,
}


def _scanned(tensor: Tensor) -> Interval:
    dtype = DType.of(tensor.dtype)
    if tensor.numel() == 0:
        return point(0, dtype)
    if tensor.numel() > _MAX_SCANNED:
        return unknown(dtype)
    values = tensor.detach()
    if dtype is DType.BOOL:
        return Interval(values.all(), values.any())
    return between(values.min(), values.max(), dtype)


def _narrow() -> Range:
    return constant(-_NARROW), constant(_NARROW)


def _assumed(bound: BoundProgram, slot: int) -> Interval:
    dtype = DType.of(bound.program.tensors[slot].dtype)
    if dtype in (DType.I32, DType.I64):
        return between(*_narrow(), dtype)
    return unknown(dtype)


def _source(bound: BoundProgram, node: Node) -> DType:
    return bound.program.nodes[node.args[0]].dtype
