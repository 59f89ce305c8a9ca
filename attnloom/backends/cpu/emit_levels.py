"""What the fragments of a program compute at which level, and what one level stores for another.

Levels follow `ir/passes/placement.py`: head, row, column, score. This pass adds what a CPU wants:
a column value that costs no more than a load (`kv + 1`) is computed again in the inner loop instead
of stored, and values that run evenly along the lanes (emit_lines) are never stored, only what their
base and step need.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.backends.cpu.emit_lines import Line, find_lines
from attnloom.ir.node import Axes, Program
from attnloom.ir.passes.placement import Level
from attnloom.ir.passes.tolerance import tolerant_nodes

POSITIONS = Axes.ALL
# Vector instructions from which a column value is stored; storing leaves one, the load.
_STORE_FROM = 3
_CHEAP = frozenset(
    "add sub neg mul abs min max eq ne lt le gt ge and or xor not where cast".split()
)
_LEAVES = ("input", "const", "number")


@dataclass(frozen=True)
class Layout:
    """A program and how its fragments share the work.

    roots: nodes that score-level functions read.
    tolerant, lines: of every node (ir/passes/tolerance.py, emit_lines.py).
    stored: for head, row and column, the nodes that other levels read from that level's struct.
    """

    program: Program
    roots: tuple[int, ...]
    tolerant: tuple[bool, ...]
    lines: tuple[Line | None, ...]
    stored: dict[Level, tuple[int, ...]]

    def is_vector(self, index: int) -> bool:
        """Whether a node differs between keys, and so is a vector in C++."""
        return bool(self.program.axes[index] & Axes.KV)

    def inner(self, index: int) -> Axes:
        """The reduction axes that a node varies along."""
        return self.program.axes[index] & ~POSITIONS

    def needs(self, index: int) -> tuple[int, ...]:
        """Nodes whose values the text of this node refers to."""
        return needs(self.program, self.lines, index)

    def index_needs(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Nodes that the text of indices refers to."""
        return index_needs(self.program, self.lines, indices)


def needs(program: Program, lines: tuple[Line | None, ...], index: int) -> tuple[int, ...]:
    """See Layout.needs."""
    node, line = program.nodes[index], lines[index]
    if line is not None:
        return line.nodes
    return index_needs(program, lines, node.args) if node.op == "load" else node.args


def index_needs(
    program: Program, lines: tuple[Line | None, ...], indices: tuple[int, ...]
) -> tuple[int, ...]:
    """Nodes that the text of a load's indices refers to: Lines are not computed as vectors."""
    if not runs_along(program, lines, indices):
        return indices
    found: list[int] = []
    for index in indices:
        line = lines[index]
        found += [index] if line is None else line.nodes
    return tuple(found)


def runs_along(program: Program, lines: tuple[Line | None, ...], indices: tuple[int, ...]) -> bool:
    """Whether indices are Lines or equal for every key, and at least one is a Line."""
    varying = [i for i in indices if program.axes[i] & Axes.KV]
    return bool(varying) and all(lines[i] is not None for i in varying)


def lay_out(program: Program, roots: tuple[int, ...], exact: bool) -> Layout:
    """Plan the fragments that read `roots`, some of the program's outputs."""
    tolerant = (False,) * len(program.nodes) if exact else tolerant_nodes(program)
    lines = find_lines(program, tolerant)
    costs = _costs(program, lines)
    found: dict[Level, set[int]] = {Level.HEAD: set(), Level.ROW: set(), Level.COLUMN: set()}
    seen: set[tuple[int, Level]] = set()
    pending = [(root, Level.SCORE) for root in roots]
    while pending:
        index, reader = pending.pop()
        if (index, reader) in seen:
            continue
        seen.add((index, reader))
        at = reader
        own = Level.of(program.axes[index])
        stays = program.axes[index] & ~POSITIONS or own is reader or own is Level.SCORE
        if not stays and _is_stored(program, lines, costs, index, own):
            found[own].add(index)
            at = own
        pending += [(arg, at) for arg in needs(program, lines, index)]
    stored = {level: tuple(sorted(nodes)) for level, nodes in found.items()}
    return Layout(program, roots, tolerant, lines, stored)


def _is_stored(
    program: Program,
    lines: tuple[Line | None, ...],
    costs: list[int],
    index: int,
    level: Level,
) -> bool:
    """Whether a level deeper than `level`, the node's own, should read it from the struct."""
    node = program.nodes[index]
    if node.op in ("input", "const"):
        return False
    if level is not Level.COLUMN:
        return True
    return lines[index] is None and costs[index] >= _STORE_FROM


def _costs(program: Program, lines: tuple[Line | None, ...]) -> list[int]:
    """Vector instructions of each node and what it needs, counted as if nothing were shared."""
    costs: list[int] = []
    for index, node in enumerate(program.nodes):
        if node.op in _LEAVES or not program.axes[index] & Axes.KV:
            costs.append(0)
        elif lines[index] is not None:
            costs.append(1)
        else:
            own = 1 if node.op in _CHEAP else 8
            costs.append(own + sum(costs[a] for a in node.args))
    return costs
