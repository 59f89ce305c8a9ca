"""The fragment that differentiates a score, and how gradients of captured tensors leave it.

A contribution is reduced in registers along every axis that its index lacks:

    index of b, h        a vector of partial sums for the whole head, in HeadGrad; one addition to
                         memory when the task leaves the head. `slope[h]` costs one add a vector.
    ... and a reduction  one such vector for each of the first HEAD_GRAD_STEPS steps
    index of q           one horizontal sum and one addition a vector
    runs along the keys  one vector addition (`bias[h, q - kv]`)
    anything else        one addition a lane

Lanes that are not live add zero, whatever value they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnloom.backends.cpu.emit_body import Body, Slots
from attnloom.backends.cpu.emit_levels import Layout, runs_along
from attnloom.ir.node import REDUCTION_AXES, Axes
from attnloom.ir.passes.gradient import Contribution
from attnloom.ir.passes.placement import Level

# Steps of a fused reduction that the tracer admits; more would be added directly.
HEAD_GRAD_STEPS = 256


@dataclass(frozen=True, slots=True)
class Sum:
    """A contribution that HeadGrad accumulates. number: of the contribution. loop: the reduction
    axis that its index varies along, or none."""

    number: int
    item: Contribution
    loop: Axes

    @property
    def name(self) -> str:
        return f"G.g{self.number}"


def head_sums(layout: Layout, items: tuple[Contribution, ...]) -> dict[int, Sum]:
    """By number, the contributions whose index is the same for a whole head."""
    found = {}
    for number, item in enumerate(items):
        axes = Axes.NONE
        for index in item.index:
            axes |= layout.program.axes[index]
        loops = [axis for axis in REDUCTION_AXES if axis & item.axes]
        if not axes & (Axes.Q | Axes.KV) and len(loops) <= 1:
            found[number] = Sum(number, item, loops[0] if loops else Axes.NONE)
    return found


def head_grad_struct(sums: dict[int, Sum]) -> list[str]:
    """Members of HeadGrad."""
    return [f"    vf g{s.number}{f'[{HEAD_GRAD_STEPS}]' if s.loop else ''};" for s in sums.values()]


def begin_text(sums: dict[int, Sum]) -> list[str]:
    """Body of head_grad_begin."""
    return [
        f"    for (int i = 0; i < {HEAD_GRAD_STEPS}; i++) {s.name}[i] = vf{{}};"
        if s.loop
        else f"    {s.name} = vf{{}};"
        for s in sums.values()
    ]


def flush_text(layout: Layout, slots: Slots, sums: dict[int, Sum]) -> list[str]:
    """Body of head_grad_flush: one addition to memory for each sum, which starts again at zero."""
    body = Body(layout, slots, Level.HEAD, (Level.HEAD,))
    for s in sums.values():
        step = ""
        if s.loop:
            body.require(*s.item.index)
            body.open_loop(s.loop)
            step = f"[r{REDUCTION_AXES.index(s.loop)}]"
            body.line(f"if (r{REDUCTION_AXES.index(s.loop)} >= {HEAD_GRAD_STEPS}) break;")
        body.line(_add_one(body, s.item, f"vf_hsum({s.name}{step})"))
        body.line(f"{s.name}{step} = vf{{}};")
        if s.loop:
            body.close_loop()
    return body.text


def grad_text(
    layout: Layout, slots: Slots, dscore: int, items: tuple[Contribution, ...]
) -> list[str]:
    """Body of score_grad. dscore: the node of dL/d(score before the mod)."""
    body = Body(layout, slots, Level.SCORE)
    sums = head_sums(layout, items)
    needed = [(*layout.index_needs(item.index), item.value) for item in items]
    body.require(dscore, *(i for nodes in needed for i in nodes))
    by_loops: dict[Axes, list[int]] = {}
    for number, item in enumerate(items):
        by_loops.setdefault(item.axes, []).append(number)
    for axes, numbers in by_loops.items():
        loops = [axis for axis in REDUCTION_AXES if axis & axes]
        for axis in loops:
            body.require(*(i for n in numbers for i in needed[n]))
            body.open_loop(axis)
        for number in numbers:
            _add(body, number, items[number], sums.get(number))
        for _ in loops:
            body.close_loop()
    body.line(f"return select(live, {body.real_vector(dscore)}, vf{{}});")
    return body.text


def _add(body: Body, number: int, item: Contribution, head_sum: Sum | None) -> None:
    value = f"d{number}"
    body.line(f"const vf {value} = select(live, {body.real_vector(item.value)}, vf{{}});")
    if head_sum is not None and head_sum.loop:
        step = f"r{REDUCTION_AXES.index(head_sum.loop)}"
        body.line(f"if ({step} < {HEAD_GRAD_STEPS}) {head_sum.name}[{step}] += {value};")
        body.line(f"else {_add_one(body, item, f'vf_hsum({value})')}")
    elif head_sum is not None:
        body.line(f"{head_sum.name} += {value};")
    elif not any(body.layout.is_vector(i) for i in item.index):
        body.line(_add_one(body, item, f"vf_hsum({value})"))
    else:
        along = runs_along(body.program, body.layout.lines, item.index)
        function = "add_line" if along else "add_lanes"
        slot = body.slots.tensors + item.slot
        body.line(f"{function}(M, {slot}, {value}{body.indices(item.index)});")


def _add_one(body: Body, item: Contribution, value: str) -> str:
    return f"add_one(M, {body.slots.tensors + item.slot}, {value}{body.indices(item.index)});"
