"""Which values of a program may be off by a few roundings without a visible effect.

A value may if all that lies between it and the outputs passes a small error on as a small error.
One that reaches a comparison, a rounding, an index, a divisor or a function with an edge (log,
sqrt, asin) may not: 49 * (1 / 49) is below 1 in float32, so that an ulp moves the edge of a mask,
the bucket of a position, or a finite value to NaN.
"""

from __future__ import annotations

from attnloom.ir.node import Program

_CONTINUOUS = frozenset(
    "add sub mul neg abs min max where cast exp exp2 expm1 sin cos atan sinh cosh tanh asinh"
    " sigmoid erf erfc reduce".split()
)


def tolerant_nodes(program: Program) -> tuple[bool, ...]:
    """For each node, whether it is a float that may be off by a few roundings."""
    strict = [False] * len(program.nodes)
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        smooth = node.op in _CONTINUOUS and node.dtype.is_float and not strict[index]
        for position, arg in enumerate(node.args):
            dividend = node.op == "div" and position == 0 and not strict[index]
            strict[arg] = strict[arg] or not (smooth or dividend)
    return tuple(n.dtype.is_float and not s for n, s in zip(program.nodes, strict, strict=True))
