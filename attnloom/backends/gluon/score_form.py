"""A score_mod in parts, so that constants and linear biases cost the inner loop next to nothing.

    score_mod(s) = outer * (inner(before * s) + bias(q, kv))

    before  joins the scale of q . k, outer the factor log2(e) of the exponentials
    inner   the rest of the program; None if it is the identity
    bias    linear in the positions with factors that depend on the head: within a tile of keys from
            k0 it is slope * (kv - k0) + bias(q, k0). The first part is a vector of keys for a whole
            tile of queries, added by the multiply-add that scales the score; the second a vector
            of queries, added after the maximum of rows (ALiBi costs 2% instead of 20%, H200)

Recognised: positive constant factors and sums at the output; a constant factor that is all that
sees the score, where a few roundings do not matter. A bias is a sum of products of head-level
values and integers that are linear in q and kv, such as `slopes[h] * (q_idx - kv_idx)`. Not
recognised: factors that are run-time numbers (see `constant`), distances under `abs`, tables.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from attnloom.ir.builder import Builder
from attnloom.ir.node import Axes, BoundProgram, DType, Program
from attnloom.ir.passes.affine import Affine, affine
from attnloom.ir.passes.simplify import simplify
from attnloom.ir.passes.tolerance import tolerant_nodes

_POSITIONS = Axes.Q | Axes.KV


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """See the module. bias: a program of two outputs, slope and bias, or None."""

    before: float
    outer: float
    inner: Program | None
    bias: Program | None


@functools.lru_cache(maxsize=1024)
def score_form(program: Program, exact: bool) -> ScoreForm:
    """The parts of a score program; all of it is `inner` if roundings must stay as they are."""
    if exact:
        return ScoreForm(1.0, 1.0, program, None)
    outer, terms, root = _peel_output(program)
    before, score = _peel_input(program, root)
    if score is None:
        score = next((i for i in range(len(program.nodes)) if _is_score(program, i)), -1)
    inner = None if root == score else _inner(program, root, score)
    return ScoreForm(before, outer, inner, _bias(program, terms, outer))


def constant(bound: BoundProgram, exact: bool) -> Program:
    """The program with the values of its numbers written into it."""
    # text tells 0.0 from -0.0
    return _constant_program(bound.program, bound.numbers, repr(bound.numbers), exact)


@functools.lru_cache(maxsize=1024)
def _constant_program(
    program: Program, numbers: tuple[int | float, ...], _text: str, exact: bool
) -> Program:
    nodes = list(program.nodes)
    for i, node in enumerate(nodes):
        if node.op == "number":
            value = numbers[int(node.attr)]  # type: ignore[call-overload]
            plain = float(value) if node.dtype.is_float else int(value)
            nodes[i] = replace(node, op="const", attr=plain)
    return simplify(replace(program, nodes=tuple(nodes)), exact)


def sees_score_alone(bound: BoundProgram | None, exact: bool) -> bool:
    """Whether what is neither a factor nor a linear bias reads the score and nothing else."""
    if bound is None or exact:
        return bound is None
    inner = score_form(bound.program, exact).inner
    return inner is None or all(
        node.op != "load" and (node.op != "input" or node.attr == "score") for node in inner.nodes
    )


Term = tuple[float, int]  # factor in units of the output, node


def _peel_output(program: Program) -> tuple[float, list[Term], int]:
    """(outer, terms of the bias, the node under both)."""
    forms = affine(program)
    (root,) = program.outputs
    outer, terms = 1.0, []
    while True:
        node = program.nodes[root]
        args = node.args
        if node.op == "mul" and _constant(program, args[1], 0.0) is not None:
            outer *= _constant(program, args[1], 0.0)  # type: ignore[operator]
            root = args[0]
        elif node.op in ("add", "sub") and _is_bias(program, forms, args[1]):
            terms.append((outer if node.op == "add" else -outer, args[1]))
            root = args[0]
        elif node.op == "add" and _is_bias(program, forms, args[0]):
            terms.append((outer, args[0]))
            root = args[1]
        else:
            return outer, terms, root


def _constant(program: Program, i: int, above: float = -math.inf) -> float | None:
    """The value of a finite float constant that is not 0 and is above a limit."""
    node = program.nodes[i]
    if node.op != "const" or not node.dtype.is_float:
        return None
    value = float(node.attr)  # type: ignore[arg-type]
    return value if math.isfinite(value) and value != 0 and value > above else None


def _is_bias(program: Program, forms: tuple[Affine | None, ...], i: int) -> bool:
    node, axes = program.nodes[i], program.axes[i]
    if node.dtype is not DType.F32:
        return False
    if not axes & _POSITIONS:
        return True
    if node.op == "cast":
        form = forms[node.args[0]]
        return form is not None and program.nodes[node.args[0]].dtype in (DType.I32, DType.I64)
    if node.op == "mul":
        one, other = node.args
        if program.axes[one] & _POSITIONS:
            one, other = other, one
        return not program.axes[one] & _POSITIONS and _is_bias(program, forms, other)
    return node.op in ("add", "sub", "neg") and all(_is_bias(program, forms, a) for a in node.args)


def _is_score(program: Program, i: int) -> bool:
    node = program.nodes[i]
    return node.op == "input" and node.attr == "score"


def _peel_input(program: Program, root: int) -> tuple[float, int | None]:
    """(before, the node that is before * score); None if the score is not seen."""
    cone = _cone(program, root)
    found = [i for i in cone if _is_score(program, i)]
    if not found:
        return 1.0, None
    tolerant = tolerant_nodes(program)
    before, score = 1.0, found[0]
    while score != root:
        users = [i for i in cone if score in program.nodes[i].args]
        node = program.nodes[users[0]]
        if len(users) > 1 or node.op != "mul" or not tolerant[users[0]]:
            break
        factor = _constant(program, node.args[1])
        if factor is None or node.args[0] != score:
            break
        before, score = before * factor, users[0]
    return before, score


def _cone(program: Program, root: int) -> list[int]:
    found: set[int] = set()
    stack = [root]
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack.extend(program.nodes[i].args)
    return sorted(found)


def _copied(build: Builder, program: Program, stop: int = -1) -> list[int]:
    """Numbers in the builder of a program's nodes; `stop` becomes the score."""
    new: list[int] = []
    for i, node in enumerate(program.nodes):
        if i == stop:
            new.append(build.input("score", node.dtype))
        else:
            new.append(build.copy(node, tuple(new[a] for a in node.args)))
    return new


def _inner(program: Program, root: int, score: int) -> Program:
    build = Builder.like(program)
    new = _copied(build, program, score)
    return build.finish(new[root])


def _bias(program: Program, terms: list[Term], outer: float) -> Program | None:
    if not terms:
        return None
    build = Builder.like(program)
    new = _copied(build, program)
    derive = _Slopes(program, affine(program), build, new)
    slope = bias = build.const(0.0, DType.F32)
    for factor, node in terms:
        scale = build.const(factor / outer, DType.F32)
        slope = build.node("add", slope, build.node("mul", scale, derive.slope(node)))
        bias = build.node("add", bias, build.node("mul", scale, new[node]))
    return simplify(build.finish(slope, bias), exact=False)


@dataclass(frozen=True)
class _Slopes:
    """Derivatives by kv of biases, as nodes of a builder that has the program's own."""

    program: Program
    forms: tuple[Affine | None, ...]
    build: Builder
    new: list[int]

    def slope(self, i: int) -> int:
        node, build = self.program.nodes[i], self.build
        if not self.program.axes[i] & Axes.KV:
            return build.const(0.0, DType.F32)
        if node.op == "cast":
            form = self.forms[node.args[0]]
            assert form is not None
            return build.const(float(form.kv), DType.F32)
        if node.op == "mul":
            one, other = node.args
            if self.program.axes[one] & _POSITIONS:
                one, other = other, one
            return build.node("mul", self.new[one], self.slope(other))
        return build.node(node.op, *(self.slope(a) for a in node.args))
