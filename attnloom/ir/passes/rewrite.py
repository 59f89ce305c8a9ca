"""What rules of simplification work with: a program being remade, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attnloom.ir.builder import Builder
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram, DType, Node
from attnloom.ir.ops import OPS

COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq", "ne"})


class Rewrite:
    """The program being made. `make` simplifies each node against those that exist.

    rules: by operation, functions of the rewrite and the operands that return an equal node, or
        None to make the node as it is. Constants come last among commutative operands.
    exact: whether the node being remade must keep its value to the bit.
    """

    def __init__(self, build: Builder, rules: Mapping[str, Callable[..., int | None]]) -> None:
        self.build, self.rules, self.exact = build, rules, True

    def remake(self, node: Node, args: tuple[int, ...]) -> int:
        if node.op == "cast":
            return self.cast(args[0], node.dtype)
        if node.op in OPS:
            return self.make(node.op, *args)
        return self.build.copy(node, args)

    def make(self, op: str, *args: int) -> int:
        if op in COMMUTATIVE:
            # Constants go last, so that the rules need to look at one side only.
            args = tuple(sorted(args, key=lambda a: (self.node(a).op == "const", a)))
        if all(self.node(a).op == "const" for a in args):
            return self._fold(op, args)
        rule = self.rules.get(op)
        found = rule(self, *args) if rule else None
        return self.build.node(op, *args) if found is None else found

    def cast(self, x: int, dtype: DType) -> int:
        source = self.node(x)
        if source.op == "const":
            return self._fold("cast", (x,), dtype)
        if source.op == "cast" and keeps_values(self.dtype(source.args[0]), source.dtype):
            return self.cast(source.args[0], dtype)
        return self.build.cast(x, dtype)

    def node(self, i: int) -> Node:
        return self.build.nodes[i]

    def dtype(self, i: int) -> DType:
        return self.build.dtype(i)

    def is_float(self, i: int) -> bool:
        return self.dtype(i).is_float

    def const(self, value: bool | int | float, like: int) -> int:
        return self.build.const(value, self.dtype(like))

    def value(self, i: int) -> bool | int | float | None:
        """The value of a constant, None for any other node."""
        node = self.node(i)
        return node.attr if node.op == "const" else None  # type: ignore[return-value]

    def is_value(self, i: int, value: float) -> bool:
        """Whether i is this constant, told apart by the sign of zero."""
        found = self.value(i)
        return found is not None and found == value and str(found)[0:1] == str(value)[0:1]

    def operand(self, i: int, op: str) -> int | None:
        """The operand of i if i is a unary `op`."""
        node = self.node(i)
        return node.args[0] if node.op == op else None

    def _fold(self, op: str, args: tuple[int, ...], dtype: DType | None = None) -> int:
        one = Builder()
        values = [one.const(self.value(a), self.dtype(a)) for a in args]  # type: ignore[arg-type]
        result = one.node(op, *values, dtype=dtype)
        program = one.finish(result)
        return self.build.const(interpret(BoundProgram(program), {})[0].item(), one.dtype(result))


_WIDTH = {DType.BOOL: 1, DType.U8: 8, DType.I8: 7, DType.I16: 15, DType.I32: 31, DType.I64: 63}
_MANTISSA = {DType.F32: 24, DType.F64: 53}


def keeps_values(source: DType, target: DType) -> bool:
    """Whether every value of `source` survives a cast to `target`."""
    if source.is_float:
        return source is target or target is DType.F64
    if target.is_float:
        return _WIDTH[source] <= _MANTISSA[target]
    if source is DType.U8 or source is DType.BOOL:
        return _WIDTH[source] <= _WIDTH[target]
    return target not in (DType.U8, DType.BOOL) and _WIDTH[source] <= _WIDTH[target]
