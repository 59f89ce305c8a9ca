"""Integer expressions that are linear in the query and key position.

    value = q * q_idx + kv * kv_idx + sum of factor * node over `terms` + constant

`terms` are head-level nodes. Recognised: add, sub, neg, mul by a constant, shl by a constant, of
values of one integer type, and casts of a position from I64 to I32. Anything without q and kv axes
counts as a term. Not recognised: division, min and max, products of two positions, loads that
depend on a position.

Coefficients are integers modulo 2^bits of the node's type, as its arithmetic is: the form is equal
to the value exactly where that does not overflow, and after wrapping always.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.ir.node import Axes, DType, Node, Program

_POSITIONS = {"q": (1, 0), "kv": (0, 1)}


@dataclass(frozen=True, slots=True)
class Affine:
    """q, kv: coefficients of the positions. terms: (factor, head-level node). See the module."""

    q: int
    kv: int
    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    def plus(self, other: Affine) -> Affine:
        factors = {node: factor for factor, node in self.terms}
        for factor, node in other.terms:
            factors[node] = factors.get(node, 0) + factor
        terms = tuple((factor, node) for node, factor in sorted(factors.items()) if factor)
        return Affine(self.q + other.q, self.kv + other.kv, terms, self.constant + other.constant)

    def times(self, factor: int) -> Affine:
        if factor == 0:
            return Affine(0, 0)
        terms = tuple((factor * f, node) for f, node in self.terms)
        return Affine(self.q * factor, self.kv * factor, terms, self.constant * factor)


def affine(program: Program) -> tuple[Affine | None, ...]:
    """The form of every node; None for those that have none, and for floats and BOOL."""
    forms: list[Affine | None] = []
    for index, node in enumerate(program.nodes):
        forms.append(_form(program, index, node, forms))
    return tuple(forms)


def _form(program: Program, index: int, node: Node, forms: list[Affine | None]) -> Affine | None:
    if not node.dtype.is_int:
        return None
    if node.op == "const":
        return Affine(0, 0, (), int(str(node.attr)))
    if node.op == "input" and node.attr in _POSITIONS:
        return Affine(*_POSITIONS[str(node.attr)])
    args = [forms[a] for a in node.args]
    rule = _RULES.get(node.op)
    found = rule(args) if rule and all(a is not None for a in args) else None
    if node.op == "cast" and found is not None and not _is_position(program, node):
        found = None
    if found is None and not program.axes[index] & ~(Axes.B | Axes.H):
        return Affine(0, 0, ((1, index),))
    return found


def _is_position(program: Program, node: Node) -> bool:
    """Whether the cast is of q or kv itself, which always fits 32 bits."""
    source = program.nodes[node.args[0]]
    return source.op == "input" and node.dtype in (DType.I32, DType.I64)


def _mul(args: list[Affine]) -> Affine | None:
    for one, other in (args, reversed(args)):
        if not (one.q or one.kv or one.terms):
            return other.times(one.constant)
    return None


def _shl(args: list[Affine]) -> Affine | None:
    value, count = args
    fixed = not (count.q or count.kv or count.terms)
    return value.times(1 << count.constant) if fixed and 0 <= count.constant < 31 else None


_RULES = {
    "add": lambda args: args[0].plus(args[1]),
    "sub": lambda args: args[0].plus(args[1].times(-1)),
    "neg": lambda args: args[0].times(-1),
    "mul": _mul,
    "shl": _shl,
    "cast": lambda args: args[0],
}
