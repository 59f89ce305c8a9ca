"""Prints a program as people write it: one assignment a line, under how often it is computed.

    once a head    h0 = slope[h]
    every score    return score + h0 * (kv_idx - q_idx)

Values that are read once are written where they are read; others get a name, whose first letter
says where they are computed: h(ead), r(ow), c(olumn), s(core). Constants and numbers are written as
their values. The exact structure is what `ir/text.py` prints.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attnloom.ir.node import REDUCTION_AXES, Axes, BoundProgram, DType, Node
from attnloom.ir.passes.placement import Level, Placement, place

WHEN = {
    Level.HEAD: "once a head",
    Level.ROW: "once a row",
    Level.COLUMN: "once a column",
    Level.SCORE: "every score",
}
_INPUTS = {"q": "q_idx", "kv": "kv_idx", **{f"r{n}": f"i{n}" for n in range(4)}}
# Operation -> (symbol, binding strength, as in Python).
_INFIX = {
    "or": ("|", 2), "xor": ("^", 3), "and": ("&", 4),
    "eq": ("==", 1), "ne": ("!=", 1), "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1),
    "ge": (">=", 1),
    "shl": ("<<", 5), "shr": (">>", 5), "add": ("+", 6), "sub": ("-", 6), "mul": ("*", 7),
    "div": ("/", 7), "floordiv": ("//", 7), "mod": ("%", 7), "pow": ("**", 9),
}  # fmt: skip
_PREFIX = {"neg": ("-", 8), "not": ("~", 8)}
_ATOM = 10
_CASTS = {d: d.value for d in DType}


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a program.

    when: how often it runs, a value of WHEN. name: of the value, "return" for the first output.
    text: an expression in Python's syntax.
    """

    when: str
    name: str
    text: str


def statements(
    bound: BoundProgram, tensor_names: Sequence[str], outputs: Sequence[str] = ("return",)
) -> tuple[Statement, ...]:
    """A program as statements, head level first.

    Args:
        bound: numbers are printed by their values.
        tensor_names: one for each captured tensor.
        outputs: a name for each output of the program; outputs beyond them are not printed.
    """
    return _Writer(bound, tuple(tensor_names)).write(outputs)


class _Writer:
    def __init__(self, bound: BoundProgram, tensor_names: tuple[str, ...]) -> None:
        self.program = bound.program
        self.numbers = bound.numbers
        self.tensor_names = tensor_names
        self.placement: Placement = place(bound.program)
        self.names: dict[int, str] = {}
        self.counts: Counter[Level] = Counter()

    def write(self, outputs: Sequence[str]) -> tuple[Statement, ...]:
        wanted = dict(zip(outputs, self.program.outputs, strict=False))
        live = self._reached(wanted.values())
        reads = Counter(a for i in live for a in self.program.nodes[i].args)
        reads.update(wanted.values())
        stored = {i for nodes in self.placement.stored.values() for i in nodes}
        lines: list[Statement] = []
        for level in Level:
            for index in self.placement.computed[level]:
                if index not in live or self._is_leaf(index):
                    continue
                repeated = reads[index] > 1 and self.program.nodes[index].op != "cast"
                if not (repeated or (index in stored and level is not Level.SCORE)):
                    continue
                text = self.text(index)
                name = self.names[index] = f"{level.value[0]}{self.counts[level]}"
                self.counts[level] += 1
                lines.append(Statement(WHEN[level], name, text))
        for name, index in wanted.items():
            lines.append(Statement(WHEN[Level.SCORE], name, self.text(index)))
        return tuple(lines)

    def _reached(self, roots: object) -> set[int]:
        found: set[int] = set()
        pending = list(roots)  # type: ignore[call-overload]
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += self.program.nodes[index].args
        return found

    def _is_leaf(self, index: int) -> bool:
        return self.program.nodes[index].op in ("input", "const", "number")

    def text(self, index: int) -> str:
        return self._render(index)[0]

    def _render(self, index: int) -> tuple[str, int]:
        """Text and binding strength of a value where it is read."""
        if index in self.names:
            return self.names[index], _ATOM
        return self._expression(self.program.nodes[index])

    def _expression(self, node: Node) -> tuple[str, int]:
        if node.op in _LEAVES:
            return _LEAVES[node.op](self, node)
        if node.op in ("mul", "div") and (kept := self._beside_one(node)) is not None:
            return self._render(kept)
        if node.op == "reciprocal":
            return f"1 / {_within(self._render(node.args[0]), 8)}", 7
        if node.op in _INFIX and len(node.args) == 2:
            symbol, strength = _INFIX[node.op]
            left, right = (self._render(a) for a in node.args)
            # Comparisons do not chain, and a right operand of equal strength needs parentheses.
            low = _within(left, strength + (strength == 1))
            return f"{low} {symbol} {_within(right, strength + 1)}", strength
        if node.op in _PREFIX:
            symbol, strength = _PREFIX[node.op]
            return f"{symbol}{_within(self._render(node.args[0]), strength)}", strength
        if node.op == "cast":
            return self._cast(node)
        arguments = ", ".join(self.text(a) for a in node.args)
        return f"{node.op}({arguments})", _ATOM

    def _beside_one(self, node: Node) -> int | None:
        """The operand that a product with 1, or a quotient by 1, leaves as it is. The number may be
        another at the next call, so that the program keeps it; a formula is of this call."""
        left, right = node.args
        if self._is_one(right):
            return left
        return right if node.op == "mul" and self._is_one(left) else None

    def _is_one(self, index: int) -> bool:
        node = self.program.nodes[index]
        if node.op in ("cast", "mul", "div", "reciprocal"):
            return all(map(self._is_one, node.args))
        if node.op == "number":
            return self.numbers[int(str(node.attr))] == 1
        return node.op == "const" and node.attr is not True and node.attr == 1

    def _cast(self, node: Node) -> tuple[str, int]:
        """A cast between integers, or from an integer to a float, reads better left out."""
        source = self.program.nodes[node.args[0]].dtype
        widening = node.dtype.is_float and not (source.is_float and source is not node.dtype)
        if widening or (node.dtype.is_int and source.is_int):
            return self._render(node.args[0])
        return f"{_CASTS[node.dtype]}({self.text(node.args[0])})", _ATOM

    def _load(self, node: Node) -> tuple[str, int]:
        name = self.tensor_names[int(str(node.attr))]
        if not node.args:
            return name, _ATOM
        return f"{name}[{', '.join(self.text(a) for a in node.args)}]", _ATOM

    def _reduce(self, node: Node) -> tuple[str, int]:
        kind, axis = node.attr  # type: ignore[misc]
        place_of = REDUCTION_AXES.index(axis)
        slot, dim = self.program.reductions[place_of]
        length = f"{self.tensor_names[slot]}.size({dim})"
        name = f"i{place_of}"
        return f"{kind}({self.text(node.args[0])} for {name} in range({length}))", _ATOM

    def _number(self, node: Node) -> tuple[str, int]:
        return _literal(self.numbers[int(str(node.attr))])


def _literal(value: object) -> tuple[str, int]:
    text = f"{value:.7g}" if isinstance(value, float) else str(value)  # float32 has 7 digits
    return text, 8 if text.startswith("-") else _ATOM


def _within(operand: tuple[str, int], strength: int) -> str:
    text, own = operand
    return text if own >= strength else f"({text})"


def _input(_: _Writer, node: Node) -> tuple[str, int]:
    return _INPUTS.get(str(node.attr), str(node.attr)), _ATOM


_LEAVES = {
    "input": _input,
    "const": lambda _, node: _literal(node.attr),
    "number": _Writer._number,
    "load": _Writer._load,
    "reduce": _Writer._reduce,
}


@functools.cache
def axis_names(axes: Axes) -> str:
    """'b h q_idx kv_idx', as far as they are among the axes."""
    pairs = ((Axes.B, "b"), (Axes.H, "h"), (Axes.Q, "q_idx"), (Axes.KV, "kv_idx"))
    return " ".join(name for axis, name in pairs if axes & axis)
