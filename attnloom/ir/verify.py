"""Checks that a Program keeps the rules that every pass and emitter relies on.

Types and arity of every node, topological order, slots in range, no duplicate and no dead nodes,
reduction axes bound, and outputs of the type their purpose asks for. What fails is a bug of the
compiler, so the error names nodes, not the user's code.
"""

from __future__ import annotations

from attnloom.ir.builder import Builder
from attnloom.ir.node import INPUT_AXES, REDUCTION_AXES, Axes, DType, Node, Program
from attnloom.ir.op_types import ProgramError
from attnloom.ir.ops import OPS

_INNER = Axes.R0 | Axes.R1 | Axes.R2 | Axes.R3
_PURPOSES = ("score", "mask", "gradient")


def verify(program: Program, purpose: str | None = None) -> Program:
    """Return `program` unchanged if it is valid.

    Args:
        program: any program.
        purpose: "score" (one float output), "mask" (one BOOL output, score unused), "gradient"
            (float outputs, indices allowed), or None to leave the outputs' types open.
    Raises:
        ProgramError: naming the first node that breaks a rule.
    """
    _slots(program)
    builder = Builder.like(program)
    for index, node in enumerate(program.nodes):
        try:
            made = _rebuild(builder, node, index)
        except ProgramError as error:
            raise ProgramError(f"%{index} = {node.op}: {error}") from None
        if made != index:
            raise ProgramError(f"%{index} repeats %{made} ({node.op})")
        if builder.nodes[index] != node:
            raise ProgramError(f"%{index} = {node.op} should be {builder.nodes[index]}, is {node}")
    _outputs(program, purpose)
    return program


def _slots(program: Program) -> None:
    for slot, dim in program.reductions:
        if not 0 <= slot < len(program.tensors):
            raise ProgramError(f"reduction over tensor {slot} of {len(program.tensors)}")
        if not 0 <= dim < program.tensors[slot].rank:
            raise ProgramError(f"reduction over dimension {dim} of tensor {slot}")
    if len(program.reductions) > len(REDUCTION_AXES):
        raise ProgramError(f"{len(program.reductions)} reductions, at most 4")
    if DType.BOOL in program.numbers:
        raise ProgramError("a number cannot be BOOL")


def _rebuild(builder: Builder, node: Node, index: int) -> int:
    """The node made again by the builder, which applies its own checks."""
    if any(not 0 <= a < index for a in node.args):
        raise ProgramError(f"uses {node.args}, not all of them earlier")
    make = _LEAVES.get(node.op)
    if make is not None:
        return make(builder, node)
    if node.op not in OPS:
        raise ProgramError("no such operation")
    return builder.node(node.op, *node.args)


def _input(builder: Builder, node: Node) -> int:
    name = str(node.attr)
    if name not in INPUT_AXES:
        raise ProgramError(f"no input is called '{name}'")
    if node.dtype.is_float != (name in ("score", "dscore")) or node.dtype is DType.BOOL:
        raise ProgramError(f"input {name} cannot be {node.dtype.value}")
    if name[0] == "r" and int(name[1:]) >= len(builder.reductions):
        raise ProgramError(f"no reduction gives {name} its length")
    return builder.input(name, node.dtype)


def _const(builder: Builder, node: Node) -> int:
    expected = bool if node.dtype is DType.BOOL else float if node.dtype.is_float else int
    if type(node.attr) is not expected:
        raise ProgramError(f"{node.dtype.value} cannot hold {node.attr!r}")
    made = builder.const(node.attr, node.dtype)
    if repr(builder.nodes[made].attr) != repr(node.attr):
        raise ProgramError(f"{node.attr} is outside {node.dtype.value}")
    return made if node.attr == node.attr else _same_nan(builder, made, node)


def _same_nan(builder: Builder, made: int, node: Node) -> int:
    builder.nodes[made] = node  # NaN differs from itself, so that the final comparison would fail
    return made


def _number(builder: Builder, node: Node) -> int:
    made = builder.number(_slot(node), node.dtype)
    if node.dtype is DType.BOOL:
        raise ProgramError("a number cannot be BOOL")
    if builder.numbers[_slot(node)].is_float and not node.dtype.is_float:
        raise ProgramError(f"float number {node.attr} read as {node.dtype.value}")
    return made


def _reduce(builder: Builder, node: Node) -> int:
    if not (isinstance(node.attr, tuple) and len(node.attr) == 2 and len(node.args) == 1):
        raise ProgramError(f"attr {node.attr!r} is no (kind, axis)")
    return builder.reduce(node.attr[0], node.attr[1], node.args[0])


def _slot(node: Node) -> int:
    if type(node.attr) is not int:
        raise ProgramError(f"slot {node.attr!r} is no int")
    return node.attr


_LEAVES = {
    "input": _input,
    "const": _const,
    "number": _number,
    "load": lambda builder, node: builder.load(_slot(node), *node.args),
    "reduce": _reduce,
    "cast": lambda builder, node: builder.node("cast", *node.args, dtype=node.dtype),
}


def _outputs(program: Program, purpose: str | None) -> None:
    if not program.outputs:
        raise ProgramError("no outputs")
    live = set(program.outputs)
    if not live <= set(range(len(program.nodes))):
        raise ProgramError(f"outputs {program.outputs} of {len(program.nodes)} nodes")
    for index in range(len(program.nodes) - 1, -1, -1):
        if index not in live:
            raise ProgramError(f"%{index} ({program.nodes[index].op}) is dead")
        live.update(program.nodes[index].args)
    if purpose is None:
        return
    if purpose not in _PURPOSES:
        raise ValueError(f"purpose is one of {_PURPOSES}, got {purpose!r}")
    first = program.nodes[program.outputs[0]].dtype
    if purpose != "gradient" and (
        len(program.outputs) != 1 or program.axes[program.outputs[0]] & _INNER
    ):
        raise ProgramError(f"a {purpose} program has one output outside reductions")
    if (first is DType.BOOL) if purpose != "mask" else (first is not DType.BOOL):
        raise ProgramError(f"a {purpose} program cannot return {first.value}")
    names = {node.attr for node in program.nodes if node.op == "input"}
    allowed = {"score": {"dscore"}, "mask": {"score", "dscore"}, "gradient": set()}[purpose]
    if names & allowed:
        raise ProgramError(f"a {purpose} program cannot read {sorted(map(str, names & allowed))}")
