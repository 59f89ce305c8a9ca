"""Reverse-mode derivative of a score program.

The gradient program holds the forward nodes that it needs, recomputed, and reads one more input,
`dscore`: dL / d(score after the mod). It differentiates through every operation of `ops.OPS` and
through fused reductions, with respect to the score before the mod and to captured tensors that
require grad. Positions, numbers and integer tensors have no derivative; an adjoint that is zero
everywhere is dropped.

A node outside a reduction that is used inside one receives the sum of its adjoints over the
reduction's axis. A captured load inside a reduction keeps the axis if its index depends on it: its
contribution is then one value for each step of that axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.ir.builder import Builder
from attnloom.ir.node import REDUCTION_AXES, Axes, DType, Node, Program
from attnloom.ir.op_derivatives import Adjoint
from attnloom.ir.ops import OPS
from attnloom.ir.passes.simplify import simplify


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one load of a captured tensor adds to the tensor's gradient.

    slot: into Program.tensors. index: one integer node for each dimension, with the same wrapping
    and clamping as the load. value: float node. axes: R axes (possibly none) that index and value
    vary along; a kernel loops over them.
    Nodes are those of Gradient.program, which lists them among its outputs.
    """

    slot: int
    index: tuple[int, ...]
    value: int
    axes: Axes


@dataclass(frozen=True, slots=True)
class Gradient:
    """program: inputs score, b, h, q, kv and dscore; outputs[0] is dL/d(score before the mod) (the
    constant 0 where the mod ignores it), then each contribution's index nodes and its value."""

    program: Program
    contributions: tuple[Contribution, ...]


def gradient(program: Program, exact: bool = True) -> Gradient:
    """Differentiate a score program.

    Args:
        program: one float output. A tensor takes part if its TensorSpec.requires_grad.
        exact: passed to `simplify`, which cleans the result.
    """
    reverse = _Reverse(program)
    reverse.run()
    build = reverse.build
    score = reverse.score
    outputs = [build.const(0.0, DType.F32) if score is None else score]
    loads: list[Node] = []
    for index, value in reverse.loads:
        node = build.nodes[reverse.copies[index]]
        loads.append(node)
        outputs += [*node.args, value]
    done = simplify(build.finish(*outputs), exact)
    contributions: list[Contribution] = []
    at = 1
    for node in loads:
        end = at + len(node.args)
        index, value = done.outputs[at:end], done.outputs[end]
        axes = _inner(done.axes[value])
        for i in index:
            axes |= _inner(done.axes[i])
        contributions.append(Contribution(int(str(node.attr)), index, value, axes))
        at = end + 1
    return Gradient(done, tuple(contributions))


def _inner(axes: Axes) -> Axes:
    return axes & ~Axes.ALL


class _Reverse:
    """One backward walk. score: adjoint of the score input; loads: (node, adjoint) of captures."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.build = Builder.like(program)
        self.copies: list[int] = []
        for node in program.nodes:
            args = tuple(self.copies[a] for a in node.args)
            self.copies.append(self.build.copy(node, args))
        self.adjoints: dict[int, int] = {}
        self.score: int | None = None
        self.loads: list[tuple[int, int]] = []

    def run(self) -> None:
        program = self.program
        (output,) = program.outputs
        wanted = _wanted(program)
        if wanted[output]:
            self.adjoints[output] = self.build.input("dscore", program.nodes[output].dtype)
        for index in range(len(program.nodes) - 1, -1, -1):
            grad = self.adjoints.pop(index, None)
            if grad is None:
                continue
            node = program.nodes[index]
            if node.op == "input":
                self.score = grad
            elif node.op == "load":
                self.loads.append((index, grad))
            else:
                self._propagate(index, node, grad, wanted)
        self.loads.reverse()  # in the order of the forward program

    def _propagate(self, index: int, node: Node, grad: int, wanted: list[bool]) -> None:
        args = tuple(self.copies[a] for a in node.args)
        scope = _inner(self.program.axes[index])
        if node.op == "reduce":
            kind, axis = node.attr  # type: ignore[misc]
            scope |= axis
            pieces = (self._reduction(kind, axis, args[0], self.copies[index], grad),)
        else:
            step = Adjoint(self.build, args, self.copies[index], grad)
            pieces = OPS[node.op].derivative(step)
        for arg, piece in zip(node.args, pieces, strict=False):
            if piece is not None and wanted[arg] and not self._is_zero(piece):
                self._accumulate(arg, piece, scope)

    def _accumulate(self, arg: int, piece: int, scope: Axes) -> None:
        """Add to the adjoint of `arg`, summed over the axes of its user that it lacks."""
        for axis in REDUCTION_AXES:
            if axis & scope & ~self.program.axes[arg]:
                piece = self.build.reduce("sum", axis, piece)
        known = self.adjoints.get(arg)
        self.adjoints[arg] = piece if known is None else self.build.node("add", known, piece)

    def _is_zero(self, i: int) -> bool:
        node = self.build.nodes[i]
        return node.op == "const" and node.attr == 0

    def _reduction(self, kind: str, axis: Axes, body: int, out: int, grad: int) -> int | None:
        """Adjoint of a reduction's body at each step of its axis."""
        if kind == "sum":
            return grad
        d = Adjoint(self.build, (body,), out, grad)
        if kind in ("min", "max"):
            # As torch.amin and amax: equal shares for all steps that attain the extremum.
            hit = d.build.cast(d("eq", body, out), d.dtype)
            return d("div", d("mul", grad, hit), d.build.reduce("sum", axis, hit))
        if kind == "prod":
            return self._product(d, axis, body)
        return None

    def _product(self, d: Adjoint, axis: Axes, body: int) -> int:
        """Product of the other steps, also where one step is zero; zero where two are."""
        zero = d("eq", body, 0.0)
        zeros = d.build.reduce("sum", axis, d.build.cast(zero, d.dtype))
        others = d.build.reduce("prod", axis, d("where", zero, 1.0, body))
        at_zero = d("where", d("eq", zeros, 1.0), others, 0.0)
        elsewhere = d("where", d("eq", zeros, 0.0), d("div", others, body), 0.0)
        return d("mul", d.grad, d("where", zero, at_zero, elsewhere))


def _wanted(program: Program) -> list[bool]:
    """For each node, whether it depends on the score or on a capture that requires grad."""
    wanted: list[bool] = []
    for node in program.nodes:
        if node.op == "input":
            wanted.append(node.attr == "score")
        elif node.op == "load":
            wanted.append(program.tensors[int(str(node.attr))].requires_grad)
        else:
            depends = any(wanted[a] for a in node.args)
            wanted.append(depends and node.dtype.is_float)
    return wanted
