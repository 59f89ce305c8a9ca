"""Loads of which an index is a position itself: `slope[h]`, `ids[b, q_idx]`.

Recognised: a position and casts of it. Rejected is everything computed, `table[h // 4]` and
`table[q_idx + 1]` too: how far that reaches, sizes alone do not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.ir.node import Node, Program

# Input of a program -> the argument of a mod.
ARGUMENTS = {"b": "b", "h": "h", "q": "q_idx", "kv": "kv_idx"}
_LIMIT = 4096
_found: dict[str, tuple[DirectLoad, ...]] = {}


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """A dimension of the captured tensor in `slot` that is indexed by the position `axis`: "b",
    "h", "q" or "kv". rank: how many indices the load has."""

    slot: int
    dim: int
    rank: int
    axis: str

    def shown(self, name: str) -> str:
        """As people write it, for a tensor of this name: "bias[:, h, ...]"."""
        after = ["..."] if self.dim + 1 < self.rank else []
        return f"{name}[{', '.join([':'] * self.dim + [ARGUMENTS[self.axis], *after])}]"


def direct_loads(program: Program) -> tuple[DirectLoad, ...]:
    """All of a program, each once, in program order."""
    found = _found.get(program.digest)
    if found is None:
        if len(_found) >= _LIMIT:
            _found.clear()
        found = _found[program.digest] = _direct_loads(program)
    return found


def _direct_loads(program: Program) -> tuple[DirectLoad, ...]:
    found: dict[DirectLoad, None] = {}
    for node in program.nodes:
        if node.op != "load":
            continue
        for dim, arg in enumerate(node.args):
            axis = _axis(program, program.nodes[arg])
            if axis is not None:
                found[DirectLoad(int(str(node.attr)), dim, len(node.args), axis)] = None
    return tuple(found)


def _axis(program: Program, node: Node) -> str | None:
    while node.op == "cast":
        node = program.nodes[node.args[0]]
    return str(node.attr) if node.op == "input" and node.attr in ARGUMENTS else None
