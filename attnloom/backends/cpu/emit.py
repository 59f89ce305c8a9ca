"""C++ fragments of a score program, its derivative and a mask program.

The text goes between the prelude (kernels/simd.h, lanes.h, vecmath.h, capture.h) and a kernel; the
functions that a kernel calls are listed in docs/design.md, section 10. Names derive from node
numbers only.

    struct Head { float n3; };             what score-level code reads of head-level values, and so
    struct Row { ... }; struct Column ...  on; empty where a mod has none, then nothing is computed
    head_values, row_values, column_values fill them
    score_mod, mask_mod, score_grad        one vector of keys of one query row
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnloom.backends.cpu import emit_gradient as grads
from attnloom.backends.cpu import emit_ops as ops
from attnloom.backends.cpu.emit_body import STRUCT_OF, Body, Slots
from attnloom.backends.cpu.emit_levels import Layout, lay_out
from attnloom.ir.builder import Builder
from attnloom.ir.node import DType, Program, TensorSpec
from attnloom.ir.passes.gradient import Contribution
from attnloom.ir.passes.gradient import gradient as differentiate
from attnloom.ir.passes.placement import Level

# Statements from which a fragment is a function of its own rather than inlined at every use.
_INLINE_LIMIT = 150
_PARAMETERS = {
    Level.HEAD: "const ModArgs& M, i64 b, i64 h, {Head}& H",
    Level.ROW: "const ModArgs& M, const {Head}& H, i64 b, i64 h, i64 q, {Row}& R",
    Level.COLUMN: "const ModArgs& M, const {Head}& H, i64 b, i64 h, i64 k0, {Column}& C",
    Level.SCORE: "const ModArgs& M, const {Head}& H, const {Row}& R, const {Column}& C, {more}"
    "i64 b, i64 h, i64 q, i64 k, int x{tail}",
}
_STRUCTS = {Level.HEAD: "Head", Level.ROW: "Row", Level.COLUMN: "Column"}


@dataclass(frozen=True, slots=True)
class Fragments:
    """Generated C++ of one score program and one mask program.

    text: to be placed after the prelude and before a kernel. Equal structure gives equal text.
    tensors: the captured tensors in slot order, the score program's first.
    num_numbers: how many slots ModArgs.reals and ModArgs.ints need.
    grad_slots: slots of `tensors` whose gradient score_grad adds to.
    """

    text: str
    tensors: tuple[TensorSpec, ...]
    num_numbers: int
    grad_slots: tuple[int, ...] = ()


def emit_fragments(
    score: Program | None,
    mask: Program | None,
    *,
    real: str,
    wide_ints: bool,
    exact_math: bool,
    gradient: bool,
) -> Fragments:
    """Generate the fragments of a kernel.

    Args:
        score: one float output; None leaves scores as they are.
        mask: one BOOL output; None keeps every key.
        real: "float" or "double", the kernel's type of scores.
        wide_ints: the text is for 64-bit integer lanes; it is the same, the prelude differs.
        exact_math: neither approximate functions nor reordered additions.
        gradient: also generate score_grad, with gradients of the captures that require them.
    """
    slots = Slots(0, 0, DType.F64 if real == "double" else DType.F32)
    lines, items = _score_text(score, slots, exact_math, gradient)
    tensors: tuple[TensorSpec, ...] = ()
    numbers = 0
    if score is not None:
        tensors, numbers = score.tensors, len(score.numbers)
    lines += _mask_text(mask, Slots(len(tensors), numbers, slots.real))
    if mask is not None:
        tensors, numbers = tensors + mask.tensors, numbers + len(mask.numbers)
    flags = {"SCORE": score is not None, "MASK": mask is not None, "CAPTURED_GRAD": bool(items)}
    header = [f"#define HAS_{name} {int(flag)}" for name, flag in flags.items()]
    text = "\n".join([*header, "", *lines, ""])
    return Fragments(text, tensors, numbers, tuple(sorted({i.slot for i in items})))


def _score_text(
    score: Program | None, slots: Slots, exact: bool, gradient: bool
) -> tuple[list[str], tuple[Contribution, ...]]:
    if score is None:
        build = Builder()
        score = build.finish(build.input("score", slots.real))
    items: tuple[Contribution, ...] = ()
    roots = score.outputs
    if gradient:
        score, roots, items = _with_gradient(score, exact)
    layout = lay_out(score, roots, exact)
    text = _level_text(layout, slots, "")
    body = Body(layout, slots, Level.SCORE)
    body.line(f"return {body.real_vector(roots[0])};")
    text += _function("vf", "score_mod", _score_parameters("", tail=", vf score"), body.text)
    if gradient:
        text += _gradient_text(layout, slots, roots[1], items)
    return text, items


def _with_gradient(
    score: Program, exact: bool
) -> tuple[Program, tuple[int, ...], tuple[Contribution, ...]]:
    """One program of the score and of its derivative, which share what they have in common.

    Returns:
        the program; its outputs: the score, dL/d(score before the mod), then indices and values of
        the contributions; the contributions, in nodes of that program.
    """
    derivative = differentiate(score, exact)
    build = Builder.like(score)
    place = _copy(build, score)
    outputs = [place[o] for o in score.outputs]
    place = _copy(build, derivative.program)
    outputs.append(place[derivative.program.outputs[0]])
    for item in derivative.contributions:
        outputs += [*(place[i] for i in item.index), place[item.value]]
    program = build.finish(*outputs)
    items, at = [], 2
    for item in derivative.contributions:
        end = at + len(item.index)
        index, value = program.outputs[at:end], program.outputs[end]
        items.append(replace(item, index=index, value=value))
        at = end + 1
    return program, program.outputs, tuple(items)


def _copy(build: Builder, program: Program) -> list[int]:
    """Nodes of a program in `build`."""
    place: list[int] = []
    for node in program.nodes:
        place.append(build.copy(node, tuple(place[a] for a in node.args)))
    return place


def _mask_text(mask: Program | None, slots: Slots) -> list[str]:
    if mask is None:
        build = Builder()
        mask = build.finish(build.const(True, DType.BOOL))
    layout = lay_out(mask, mask.outputs, exact=True)
    text = _level_text(layout, slots, "Mask")
    body = Body(layout, slots, Level.SCORE)
    body.line(f"return {body.vector(mask.outputs[0])};")
    return text + _function("vm", "mask_mod", _score_parameters("Mask"), body.text)


def _level_text(layout: Layout, slots: Slots, prefix: str) -> list[str]:
    """Structs of the three levels, and the functions that fill them."""
    text: list[str] = []
    nodes = layout.program.nodes
    for level, struct in _STRUCTS.items():
        members = []
        for index in layout.stored[level]:
            if level is Level.COLUMN:
                element = ops.ELEMENT_TYPES[nodes[index].dtype]
                members.append(f"    alignas(64) {element} n{index}[TILE_N];")
            else:
                members.append(f"    {ops.SCALAR_TYPES[nodes[index].dtype]} n{index};")
        text += [f"struct {prefix}{struct} {{", *members, "};"]
    for level in _STRUCTS:
        name = f"{prefix.lower()}{'_' if prefix else ''}{level.value}_values"
        parameters = _PARAMETERS[level].format(**_struct_names(prefix))
        text += _function("void", name, parameters, _fill_text(layout, slots, level))
    return text


def _fill_text(layout: Layout, slots: Slots, level: Level) -> list[str]:
    stored = layout.stored[level]
    if not stored:
        return []
    body = Body(layout, slots, level)
    if level is not Level.COLUMN:
        for index in stored:
            body.line(f"{STRUCT_OF[level]}.n{index} = {body.value(index)};")
        return body.text
    body.indent = 2
    for index in stored:
        body.line(f"store_as(C.n{index} + x, {body.value(index)});")
    head = ["    for (int x = 0; x < TILE_N; x += W) {", "        const i64 k = k0 + x;"]
    return [*head, *body.text, "    }"]


def _gradient_text(
    layout: Layout, slots: Slots, dscore: int, items: tuple[Contribution, ...]
) -> list[str]:
    sums = grads.head_sums(layout, items)
    text = ["struct HeadGrad {", *grads.head_grad_struct(sums), "};"]
    text += _function("void", "head_grad_begin", "HeadGrad& G", grads.begin_text(sums))
    text += _function(
        "void",
        "head_grad_flush",
        "const ModArgs& M, const Head& H, HeadGrad& G, i64 b, i64 h",
        grads.flush_text(layout, slots, sums),
    )
    parameters = _score_parameters("", "HeadGrad& G, ", ", vf score, vf dscore, vm live")
    body = grads.grad_text(layout, slots, dscore, items)
    return text + _function("vf", "score_grad", parameters, body)


def _score_parameters(prefix: str, more: str = "", tail: str = "") -> str:
    return _PARAMETERS[Level.SCORE].format(**_struct_names(prefix), more=more, tail=tail)


def _struct_names(prefix: str) -> dict[str, str]:
    return {struct: prefix + struct for struct in _STRUCTS.values()}


def _function(result: str, name: str, parameters: str, body: list[str]) -> list[str]:
    kind = "INLINE" if len(body) <= _INLINE_LIMIT else "NOINLINE"
    return ["", f"{kind} {result} {name}({parameters}) {{", *body, "}"]
