"""Prints a Program, one node a line, for people and for golden tests.

    %3 = add f32 %1 %2    # q kv

The comment holds the axes that the value depends on. The text is stable: it depends on nothing but
the program.
"""

from __future__ import annotations

from collections.abc import Callable

from attnloom.ir.node import Axes, Node, Program

_COMMENT_COLUMN = 36


def text(program: Program) -> str:
    """The whole program: binding slots, nodes, outputs. Ends without a newline."""
    lines = [
        f"tensor t{i}: {str(spec.dtype).removeprefix('torch.')} rank {spec.rank}"
        + (" grad" if spec.requires_grad else "")
        for i, spec in enumerate(program.tensors)
    ]
    lines += [f"number n{i}: {dtype.value}" for i, dtype in enumerate(program.numbers)]
    lines += [f"length r{i}: t{slot} dim {d}" for i, (slot, d) in enumerate(program.reductions)]
    for index, (node, axes) in enumerate(zip(program.nodes, program.axes, strict=True)):
        line = f"%{index} = {node.op} {node.dtype.value}{_operands(node)}"
        names = " ".join(str(a.name).lower() for a in Axes if a in axes and a in _SINGLE)
        lines.append(f"{line:<{_COMMENT_COLUMN}}# {names}" if names else line)
    lines.append("return " + " ".join(f"%{i}" for i in program.outputs))
    return "\n".join(lines)


_SINGLE = tuple(a for a in Axes if a and a & (a - 1) == 0)


def _operands(node: Node) -> str:
    return _FORMS.get(node.op, _plain)(node)


def _plain(node: Node) -> str:
    attr = "" if node.attr is None else f" {node.attr}"
    return attr + "".join(f" %{a}" for a in node.args)


def _load(node: Node) -> str:
    return f" t{node.attr}[{', '.join(f'%{a}' for a in node.args)}]"


def _reduce(node: Node) -> str:
    kind, axis = node.attr  # type: ignore[misc]
    return f" {kind} {axis.name.lower()} %{node.args[0]}"


_FORMS: dict[str, Callable[[Node], str]] = {
    "const": lambda node: f" {node.attr!r}",
    "number": lambda node: f" n{node.attr}",
    "load": _load,
    "reduce": _reduce,
}
