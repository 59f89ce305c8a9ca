"""How many heads and batch entries a mod speaks of: the lengths of what it indexes by h and by b.

`slope[h]` of length 8 says that there are 8 heads. Only an index that is the position itself
counts, a cast of it included: `table[h // 4]` and `table[(h + 1) % 8]` say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.ir.node import BoundProgram, Node, Program

_AXES = ("b", "h")


@dataclass(frozen=True, slots=True)
class AxisLength:
    """axis: "b" or "h". length: of a captured tensor's dimension that the axis indexes directly.
    load: as a person writes it, `bias[h, ...]`."""

    axis: str
    length: int
    load: str


def axis_lengths(bound: BoundProgram, names: tuple[str, ...]) -> list[AxisLength]:
    """Every dimension that b or h indexes directly, in program order.

    Args:
        names: one for each captured tensor.
    """
    found = []
    for node in bound.program.nodes:
        if node.op != "load":
            continue
        slot = int(str(node.attr))
        for dim, arg in enumerate(node.args):
            axis = _axis(bound.program, bound.program.nodes[arg])
            if axis is not None:
                load = f"{names[slot]}[{_index(dim, len(node.args), axis)}]"
                found.append(AxisLength(axis, bound.tensors[slot].size(dim), load))
    return found


def _axis(program: Program, node: Node) -> str | None:
    while node.op == "cast":
        node = program.nodes[node.args[0]]
    return str(node.attr) if node.op == "input" and node.attr in _AXES else None


def _index(dim: int, rank: int, axis: str) -> str:
    before = [":"] * dim
    return ", ".join([*before, axis, *(["..."] if dim + 1 < rank else [])])
