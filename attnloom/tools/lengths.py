"""Which sizes a mod speaks of: the lengths of what it indexes by b, h, q_idx and kv_idx, and the
sizes that a factory noted on it.

`slope[h]` of length 8 says that there are 8 heads. Only an index that is the position itself
counts, a cast of it included: `table[h // 4]` and `table[(h + 1) % 8]` say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnloom.ir.node import BoundProgram, Node, Program
from attnloom.masking import extent

# Input of a program -> the argument of a mod.
_ARGUMENTS = {"b": "b", "h": "h", "q": "q_idx", "kv": "kv_idx"}
_LENGTHS: dict[extent.Axis, str] = {"Q_LEN": "q", "KV_LEN": "kv"}


@dataclass(frozen=True, slots=True)
class AxisLength:
    """axis: "b", "h", "q" or "kv". length: of a captured tensor's dimension that the axis indexes
    directly, or that a factory noted. why: as a person says it, "bias[h, ...] has that length".
    exact: other lengths than this are mistakes, smaller ones too."""

    axis: str
    length: int
    why: str
    exact: bool = False


def axis_lengths(bound: BoundProgram, names: tuple[str, ...]) -> list[AxisLength]:
    """Every dimension that a position indexes directly, in program order.

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
                load = f"{names[slot]}[{_index(dim, len(node.args), _ARGUMENTS[axis])}]"
                length = bound.tensors[slot].size(dim)
                found.append(AxisLength(axis, length, f"{load} has that length"))
    return found


def noted_lengths(mod: Any) -> Iterator[AxisLength]:
    """Lengths that the factory of a mod noted on it."""
    for limit in extent.limits_of(mod, axes=extent.LENGTHS):
        yield AxisLength(_LENGTHS[limit.axis], limit.size, limit.source, limit.exact)


def told(lengths: list[AxisLength], axis: str) -> AxisLength | None:
    """What says most about an axis: an exact length, else the shortest, so that every load is in
    range."""
    found = [x for x in lengths if x.axis == axis and x.length > 0]
    return min(found, key=lambda x: (not x.exact, x.length), default=None)


def _axis(program: Program, node: Node) -> str | None:
    while node.op == "cast":
        node = program.nodes[node.args[0]]
    return str(node.attr) if node.op == "input" and node.attr in _ARGUMENTS else None


def _index(dim: int, rank: int, axis: str) -> str:
    before = [":"] * dim
    return ", ".join([*before, axis, *(["..."] if dim + 1 < rank else [])])
