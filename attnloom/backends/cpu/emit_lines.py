"""Values that run evenly along the key lanes.

A Line is `base + step * lane`, base and step the same for every lane: `kv - q`, `offset[b] + kv`,
and, where rounding twice instead of once is allowed, `slope[h] * (kv - q)`. A captured load whose
indices are Lines is a plain vector load; a Line needed as a vector costs one broadcast and one
addition, however long its expression.

Recognised: add, sub, neg, multiplication by a value that is the same for every key, of I64 and I32
and, if tolerant, floats; casts between I64 and I32 and from them to floats. Not recognised:
divisions, min, max, products of two Lines, 8- and 16-bit integers (they wrap).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from attnloom.ir.node import Axes, DType, Node, Program

_INDEX_TYPES = (DType.I64, DType.I32)
# Longer expressions are computed as vectors: every use of a Line repeats its text.
_MAX_TEXT = 240
_REFERENCE = re.compile(r"\{(\d+)\}")
_C_FLOATS = {DType.F32: "float", DType.F64: "double"}


@dataclass(frozen=True, slots=True)
class Line:
    """base, step: C++ expressions of one scalar; `{i}` stands for node i, which is the same for
    every key, and `k` for the key of lane 0. As Python format strings."""

    base: str
    step: str

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that the expressions mention."""
        return tuple(sorted({int(i) for i in _REFERENCE.findall(self.base + self.step)}))

    @property
    def fits(self) -> bool:
        return len(self.base) + len(self.step) <= _MAX_TEXT


def find_lines(program: Program, tolerant: tuple[bool, ...]) -> tuple[Line | None, ...]:
    """The Line of every node that depends on the key position and has one."""
    lines: list[Line | None] = []
    for index, node in enumerate(program.nodes):
        line = None
        if program.axes[index] & Axes.KV:
            line = _line(program, node, lines, tolerant[index])
        lines.append(line if line is not None and line.fits else None)
    return tuple(lines)


def _line(program: Program, node: Node, lines: list[Line | None], tolerant: bool) -> Line | None:
    if node.op == "input":
        return Line("k", "1") if node.attr == "kv" else None
    if not (node.dtype in _INDEX_TYPES or (node.dtype.is_float and tolerant)):
        return None
    rule = _RULES.get(node.op)
    if rule is None:
        return None
    operands = []
    for arg in node.args:
        same = not program.axes[arg] & Axes.KV
        operands.append(Line(f"{{{arg}}}", "0") if same else lines[arg])
    if any(operand is None for operand in operands):
        return None
    if node.op == "cast":
        return _cast(program.nodes[node.args[0]].dtype, node.dtype, operands[0])
    return rule(*operands)


def _cast(source: DType, target: DType, line: Line | None) -> Line | None:
    assert line is not None
    if target in _INDEX_TYPES:
        return line if source in _INDEX_TYPES else None
    if source not in _INDEX_TYPES:
        return None
    name = _C_FLOATS[target]
    whole = re.fullmatch(r"-?\d+", line.step)
    return Line(f"({name}){line.base}", line.step if whole else f"({name}){line.step}")


def _add(a: Line, b: Line) -> Line:
    return Line(f"({a.base} + {b.base})", _sum(a.step, "+", b.step))


def _sub(a: Line, b: Line) -> Line:
    return Line(f"({a.base} - {b.base})", _sum(a.step, "-", b.step))


def _neg(a: Line) -> Line:
    return Line(f"(-{a.base})", _sum("0", "-", a.step))


def _mul(a: Line, b: Line) -> Line | None:
    for line, factor in ((a, b), (b, a)):
        if factor.step == "0":
            step = factor.base if line.step == "1" else f"({line.step} * {factor.base})"
            return Line(f"({line.base} * {factor.base})", step)
    return None


def _sum(a: str, sign: str, b: str) -> str:
    """Steps are mostly 0, 1 and -1: keep them readable, and -1 recognisable."""
    if b == "0":
        return a
    if re.fullmatch(r"-?\d+", a) and re.fullmatch(r"-?\d+", b):
        return str(int(a) + int(b) if sign == "+" else int(a) - int(b))
    return b if a == "0" and sign == "+" else f"({a} {sign} {b})"


_RULES: dict[str, Callable[..., Line | None]] = {
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "cast": _cast,
}
