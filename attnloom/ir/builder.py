"""Builds a Program node by node, sharing equal nodes as they are made."""

from __future__ import annotations

from collections.abc import Iterable

from attnloom.ir.node import INPUT_AXES, REDUCTION_AXES, Axes, DType, Node, Program, TensorSpec
from attnloom.ir.op_types import ProgramError, reduction
from attnloom.ir.ops import OPS, REDUCTIONS

_INPUT_TYPES = {"score": DType.F32, "dscore": DType.F32}
_INT_BITS = {DType.U8: 8, DType.I8: 8, DType.I16: 16, DType.I32: 32, DType.I64: 64}


class Builder:
    """A growing list of nodes in which common subexpressions exist once.

    tensors, numbers, reductions: the binding slots; callers append to them, then refer to the
        position. They keep their numbers in the finished program.

    Every method that makes a node returns its index and checks types and operands: a mistake is an
    ProgramError at the place that made it.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec] = (),
        numbers: Iterable[DType] = (),
        reductions: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.tensors = list(tensors)
        self.numbers = list(numbers)
        self.reductions = list(reductions)
        self.nodes: list[Node] = []
        self._axes: list[Axes] = []
        self._known: dict[tuple[object, ...], int] = {}

    @classmethod
    def like(cls, program: Program) -> Builder:
        """An empty builder with the binding slots of `program`."""
        return cls(program.tensors, program.numbers, program.reductions)

    def node(self, op: str, *args: int, attr: object = None, dtype: DType | None = None) -> int:
        """An operation of `OPS`; its type follows from the operands, a cast's must be given."""
        rule = OPS.get(op)
        if rule is None:
            raise ProgramError(f"no operation is called '{op}'")
        if len(args) != rule.arity:
            raise ProgramError(f"{op} takes {rule.arity} operands, got {len(args)}")
        if dtype is None:
            dtype = rule.result(tuple(self.dtype(a) for a in args))
        return self._add(Node(op, tuple(args), dtype, attr))

    def input(self, name: str, dtype: DType | None = None) -> int:
        """A key of INPUT_AXES: positions are I64 and scores F32 unless said otherwise."""
        if name not in INPUT_AXES:
            raise ProgramError(f"no input is called '{name}'")
        return self._add(Node("input", (), dtype or _INPUT_TYPES.get(name, DType.I64), name))

    def const(self, value: bool | int | float, dtype: DType) -> int:
        """A value baked into the program; integers wrap to their type."""
        if dtype is DType.BOOL:
            return self._add(Node("const", (), dtype, bool(value)))
        if dtype.is_float:
            return self._add(Node("const", (), dtype, float(value)))
        return self._add(Node("const", (), dtype, wrap_int(int(value), dtype)))

    def number(self, slot: int, dtype: DType) -> int:
        """Run-time scalar `slot`; an integer slot may also be read as a float."""
        if not 0 <= slot < len(self.numbers):
            raise ProgramError(f"number slot {slot} of {len(self.numbers)}")
        return self._add(Node("number", (), dtype, slot))

    def load(self, slot: int, *index: int) -> int:
        """Element of captured tensor `slot`; one integer node for each dimension."""
        if not 0 <= slot < len(self.tensors):
            raise ProgramError(f"tensor slot {slot} of {len(self.tensors)}")
        spec = self.tensors[slot]
        if len(index) != spec.rank:
            raise ProgramError(f"tensor {slot} has rank {spec.rank}, got {len(index)} indices")
        if not all(self.dtype(i).is_int for i in index):
            raise ProgramError("an index must be an integer")
        return self._add(Node("load", tuple(index), DType.of(spec.dtype), slot))

    def cast(self, value: int, dtype: DType) -> int:
        """`value` as another type, or itself if it has that type."""
        if self.dtype(value) is dtype:
            return value
        return self._add(Node("cast", (value,), dtype))

    def reduce(self, kind: str, axis: Axes, body: int) -> int:
        """Reduce `body` over one of R0..R3: sum, prod, min, max, any or all."""
        if kind not in REDUCTIONS:
            raise ProgramError(f"no reduction is called '{kind}'")
        if axis not in REDUCTION_AXES[: len(self.reductions)]:
            raise ProgramError(f"{axis!r} is not one of {len(self.reductions)} reduction axes")
        dtype = reduction(kind, self.dtype(body))
        return self._add(Node("reduce", (body,), dtype, (kind, axis)))

    def copy(self, node: Node, args: tuple[int, ...]) -> int:
        """`node` of another program with the same slots, on these operands."""
        return self._add(Node(node.op, args, node.dtype, node.attr))

    def dtype(self, i: int) -> DType:
        return self.nodes[i].dtype

    def axes(self, i: int) -> Axes:
        return self._axes[i]

    def finish(self, *outputs: int) -> Program:
        """The program of these outputs: dead nodes dropped, the others renumbered in order."""
        live = set(outputs)
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in live:
                live.update(self.nodes[i].args)
        place = {old: new for new, old in enumerate(sorted(live))}
        nodes = tuple(
            Node(n.op, tuple(place[a] for a in n.args), n.dtype, n.attr)
            for n in (self.nodes[i] for i in sorted(live))
        )
        return Program(
            nodes,
            tuple(place[o] for o in outputs),
            tuple(self.tensors),
            tuple(self.numbers),
            tuple(self.reductions),
        )

    def _add(self, node: Node) -> int:
        # repr tells 1 from True and 1.0, -0.0 from 0.0, and finds NaN equal to itself.
        key = (node.op, node.args, node.dtype, repr(node.attr))
        found = self._known.get(key)
        if found is not None:
            return found
        index = self._known[key] = len(self.nodes)
        axes = INPUT_AXES[str(node.attr)] if node.op == "input" else Axes.NONE
        for arg in node.args:
            if not 0 <= arg < index:
                raise ProgramError(f"{node.op} uses node {arg}, which does not exist")
            axes |= self._axes[arg]
        if node.op == "reduce":
            axes &= ~node.attr[1]  # type: ignore[index]
        self.nodes.append(node)
        self._axes.append(axes)
        return index


def wrap_int(value: int, dtype: DType) -> int:
    """`value` reduced to what `dtype` can hold, two's complement."""
    bits = _INT_BITS[dtype]
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype is not DType.U8 and value >> (bits - 1) else value


def extract(program: Program, *outputs: int) -> Program:
    """The part of `program` that computes these of its nodes, with the same binding slots."""
    builder = Builder.like(program)
    for node in program.nodes:  # nothing is shared anew: indices stay as they are
        builder.copy(node, node.args)
    return builder.finish(*outputs)
