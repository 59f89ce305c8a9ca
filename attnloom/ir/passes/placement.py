"""Where each node of a program is computed: once a head, once a row, once a column or every score.

A value that lacks the key axis is the same for every key, and a kernel computes it once a row; one
that lacks the query axis, once a column; one that lacks both, once a head. The score itself, and
whatever depends on a query and a key together, stays in the inner loop.

Nodes inside a fused reduction (those with an R axis) are recomputed wherever the reduction is: they
are listed with it, in order, and are never stored.

Not done: splitting an expression whose parts have different levels, such as `a[q] + score + b[q]`;
that needs reassociation, which `simplify` does not do either.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from attnloom.ir.node import Axes, Program


class Level(enum.Enum):
    """How often a value is computed. Row and column values may use head values only."""

    HEAD = "head"
    ROW = "row"
    COLUMN = "column"
    SCORE = "score"

    @staticmethod
    def of(axes: Axes) -> Level:
        return _LEVELS[axes & (Axes.Q | Axes.KV)]


_LEVELS = {
    Axes.NONE: Level.HEAD,
    Axes.Q: Level.ROW,
    Axes.KV: Level.COLUMN,
    Axes.Q | Axes.KV: Level.SCORE,
}
# Cheaper to name again than to store: constants, and the positions, which every fragment is given.
_EVERYWHERE = ("const", "input")


@dataclass(frozen=True, slots=True)
class Loop:
    """A fused reduction. reduce: its node. body: the nodes with R axes that one step computes, in
    order; nested reductions are among them and have loops of their own."""

    reduce: int
    body: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """levels: of every node; for a node with R axes, the level its B, H, Q, KV axes call for.
    inner: whether a node has R axes, and so belongs to loops only.
    computed: for each level, the nodes outside reductions that it computes, in order, constants and
        inputs included where this level uses them.
    stored: for each level but SCORE, the nodes that another level reads. Constants and inputs are
        never stored.
    loops: by reduce node.
    """

    levels: tuple[Level, ...]
    inner: tuple[bool, ...]
    computed: dict[Level, tuple[int, ...]]
    stored: dict[Level, tuple[int, ...]]
    loops: dict[int, Loop]


def place(program: Program) -> Placement:
    """Assign a level to every node. Outputs are read at score level, whatever their own is."""
    axes = program.axes
    levels = tuple(Level.of(a) for a in axes)
    inner = tuple(bool(a & ~Axes.ALL) for a in axes)
    readers = _readers(program, levels, inner)
    stored: dict[Level, list[int]] = {level: [] for level in Level if level is not Level.SCORE}
    computed: dict[Level, list[int]] = {level: [] for level in Level}
    for index, node in enumerate(program.nodes):
        if inner[index]:
            continue
        if node.op in _EVERYWHERE:
            for level in readers[index]:
                computed[level].append(index)
            continue
        computed[levels[index]].append(index)
        if readers[index] - {levels[index]}:
            stored[levels[index]].append(index)
    loops = {
        index: Loop(index, loop_body(program, *node.args))
        for index, node in enumerate(program.nodes)
        if node.op == "reduce"
    }
    return Placement(
        levels,
        inner,
        {level: tuple(nodes) for level, nodes in computed.items()},
        {level: tuple(nodes) for level, nodes in stored.items()},
        loops,
    )


def _readers(
    program: Program, levels: tuple[Level, ...], inner: tuple[bool, ...]
) -> list[set[Level]]:
    """Levels at which each node is read. A node of a loop reads at the level of its reduction."""
    readers: list[set[Level]] = [set() for _ in program.nodes]
    for output in program.outputs:
        readers[output].add(Level.SCORE)
    for index in range(len(program.nodes) - 1, -1, -1):
        at = readers[index] if inner[index] else {levels[index]}
        for arg in program.nodes[index].args:
            readers[arg] |= at
    return readers


def loop_body(program: Program, *roots: int) -> tuple[int, ...]:
    """Nodes with R axes that one step of a loop computes for these roots, in order, roots included
    if they have R axes themselves.

    A reduction among them is one node: its own loop lists what only it needs. Used for the operand
    of a reduction, and for the outputs of a gradient program that vary along an R axis.
    """
    needed: set[int] = set()
    pending = list(roots)
    while pending:
        index = pending.pop()
        if index in needed or not program.axes[index] & ~Axes.ALL:
            continue
        needed.add(index)
        node = program.nodes[index]
        if node.op != "reduce":
            pending += node.args
    return tuple(sorted(needed))
