"""Turn mask programs into the jit functions that Gluon kernels call. The contract: fragments.py.

A thread holds the scores of a few rows and of many columns, and compares each with what the mask
says of its row. Comparisons of a column's position with values that do not depend on it
(ir/passes/edges.py) are written beside the columns' numbers in their tile, less what a thread's
lane adds to them: those are literals, and take neither registers nor additions. A step of a causal
mask, D=64, is 568 instructions for 689 of before, of a window of D=128 662 for 849 (sm_90).

Columns are keys in the forward and for heads of 129 to 192 in the backward. Others there have
scores transposed and no edges, which cost time in all steps where columns are queries. Where
nothing is proved of the sizes of positions, masks have no edges.
"""

from __future__ import annotations

import functools

from triton.experimental.gluon import language as gl

from attnloom.backends.gluon.emit import ROW, SCORE, LevelWriter, gluon_module
from attnloom.backends.triton.emit import NEAR, Target
from attnloom.backends.triton.layouts import is_narrow
from attnloom.ir.node import Axes, DType, Program
from attnloom.ir.passes.edges import CLAMP, Edge, Extremum, Form, Linear, Value, edges

# Columns 8 i + 2 lane + {0, 1} are those of a thread in the layouts of Hopper's products.
LANE = gl.constexpr(6)


class MaskWriter(LevelWriter):
    """Writes the functions of a mask. along: the position of columns, Axes.Q or Axes.KV; NONE:
    no edges."""

    def __init__(self, program: Program, target: Target, along: Axes) -> None:
        super().__init__(program, "mask", target)
        self.along = along
        self.forms: dict[int, Form] = {}
        if along and target.near and not target.wide:
            narrow = frozenset(s for s in range(len(program.tensors)) if self._is_narrow(s))
            forms = self._worth_it(edges(program, along, NEAR, narrow))
            if not self._computes_positions(forms):
                self.forms = forms
        self.edges: list[Edge] = []
        self.ends = -1  # the edge that the last columns of a tile may be cut off with
        self._place()

    def _worth_it(self, forms: dict[int, Form]) -> dict[int, Form]:
        """Forms, but of what is computed once a column for something other than edges."""
        kept = dict(forms)
        users: dict[int, list[int]] = {}
        for i, node in enumerate(self.program.nodes):
            for a in node.args:
                users.setdefault(a, []).append(i)
        for i in sorted(forms, reverse=True):
            shared = any(self.levels[u] != SCORE and u not in kept for u in users.get(i, ()))
            if self.levels[i] != SCORE and shared:
                del kept[i]
        return kept

    def _live(self, forms: dict[int, Form]) -> set[int]:
        """What the mask is computed from, in these forms."""
        (output,) = self.program.outputs
        live = {output}
        for i in range(output, -1, -1):
            if i in live:
                form = forms.get(i)
                live.update(form.nodes() if form else self.program.nodes[i].args)
        return live

    def _computes_positions(self, forms: dict[int, Form]) -> bool:
        """Whether scores have integers of their own, as `(q - kv) % 3`, beside which edges would
        only take more registers (strided_sparse, D=128: 160 bytes spilled for none)."""
        return any(
            self.levels[i] == SCORE and self.program.nodes[i].dtype.is_int
            for i in self._live(forms)
            if self.program.nodes[i].op != "load"
        )

    def _place(self) -> None:
        """What is written, and at which level."""
        (output,) = self.program.outputs
        live = self._live(self.forms)
        for i, node in enumerate(self.program.nodes):
            form = self.forms.get(i)
            self.reads[i] = () if i not in live else form.nodes() if form else node.args
        self.forms = {i: form for i, form in self.forms.items() if i in live}
        for i in sorted(live):
            if i in self.forms or any(self.levels[a] == SCORE for a in self.reads[i]):
                self.levels[i] = SCORE
        for i, form in self.forms.items():
            parts = (form,) if isinstance(form, Edge) else form.parts
            for part in parts:
                if isinstance(part, Edge) and part not in self.edges:
                    self.edges.append(part)
            if i == output and (isinstance(form, Edge) or form.how == "and"):
                ends = [
                    self.edges.index(p) for p in parts if isinstance(p, Edge) and p.side == "le"
                ]
                self.ends = ends[0] if ends else -1
        self.written = frozenset(live)
        self.find_across()

    @property
    def joins(self) -> bool:
        """Whether the mask is several conditions, the end of columns included, that are best
        joined first (builtins.chosen): edges, and in the forward comparisons with one value that is
        looked up by key, in 32 bits. All conditions of a tile may be computed before the first
        selection, so that what is more than that spills (neighborhood, D=128: 1,432 bytes for
        332)."""
        form = self.forms.get(self.program.outputs[0])
        if not self.along or (isinstance(form, Edge) and form.side == "le"):
            return False
        return len(self.column) < 2 and all(
            self._joins_well(i) for i in self.written if self.levels[i]
        )

    def _joins_well(self, i: int) -> bool:
        node, forward = self.program.nodes[i], bool(self.along & Axes.KV)
        if node.op == "load":
            narrow = node.dtype is not DType.I64 or self._is_narrow(node.attr)
            return narrow and forward and self.levels[i] != SCORE
        return (
            self.levels[i] == ROW
            or node.op == "input"
            or (self.levels[i] == SCORE and node.dtype is DType.BOOL)
        )

    def _is_narrow(self, slot: object) -> bool:
        return is_narrow(self.target.layouts, int(str(slot))) and not self.target.wide

    def functions(self) -> tuple[str, ...]:
        """mask_head, mask_row, mask_column, mask_edges and mask_body."""
        return *self.outer(), self._edges(), self.body("")

    def _edges(self) -> str:
        """mask_edges: those of a tile's rows, less its first column. limit: the last column that
        exists."""
        position, side = ("q", "row") if self.along & Axes.KV else ("kv", "column")
        lines = self._unpack("head") + self._unpack(side)
        names = [f"e{k}" for k in range(len(self.edges))]
        for k, edge in enumerate(self.edges):
            lines.append(f"e{k} = {self._value(edge.value)} - first")
        if self.ends >= 0:
            cut = f"e{self.ends} = tl.minimum(e{self.ends}, limit)"
            lines += ["if LIMITED:", f"    {cut}"]
        else:
            names.append("limit")
        lines.append(f"return ({', '.join(names)}, )")
        params = f"args, head, {side}, b, h, {position}, first, limit, LIMITED: tl.constexpr"
        return self._define("edges", params, lines)

    def _value(self, value: Value) -> str:
        if isinstance(value, Extremum):
            text = self._value(value.values[0])
            for other in value.values[1:]:
                text = f"tl.{value.how}imum({text}, {self._value(other)})"
            return text
        text = ""
        for factor, node in value.terms:
            times = "" if abs(factor) == 1 else f"{abs(factor)} * "
            sign = "-" if factor < 0 else "+" if text else ""
            text += f" {sign} {times}{self._whole(node, value)}"
        if value.constant or not text:
            text += f" + {value.constant}" if value.constant >= 0 else f" - {-value.constant}"
        return f"({text.removeprefix(' + ').strip()})"

    def _whole(self, i: int, value: Linear) -> str:
        """A node in 32 bits."""
        name = self._name(i)
        if i == value.clamped:
            name = f"tl.minimum(tl.maximum({name}, {-CLAMP}), {CLAMP})"
        return name if self.program.nodes[i].op == "input" else f"tl.cast({name}, tl.int32)"

    def _statement(self, i, node, lines, indent) -> None:
        form = self.forms.get(i)
        if i not in self.written:
            return
        if form is None:
            super()._statement(i, node, lines, indent)
        elif isinstance(form, Edge):
            lines.append(f"{indent}v{i} = {self._compared(form)}")
        else:
            sign = " & " if form.how == "and" else " | "
            parts = (
                self._compared(p) if isinstance(p, Edge) else self._name(p) for p in form.parts
            )
            lines.append(f"{indent}v{i} = {sign.join(parts)}")

    def _compared(self, edge: Edge) -> str:
        sign = {"le": "<=", "ge": ">=", "eq": "==", "ne": "!="}[edge.side]
        return f"(place {sign} e{self.edges.index(edge)})"

    def body(self, inputs: str) -> str:
        """As of a score_mod, with edges as `mask_edges` gives them and columns' numbers."""
        result = self._name(self.program.outputs[0])
        side, other = ("1 - QX", "QX") if self.along & Axes.KV else ("QX", "1 - QX")
        lines = self.expanded()
        lines += [
            f"place = tl.expand_dims(place, {side})",
            f"lane = place & {LANE.value}",
            f"place = place & {~LANE.value}",
        ]
        for k, edge in enumerate(self.edges):
            value = f"edges[{k}]"
            if any(self.levels[node] for node in edge.nodes()):
                value = f"tl.expand_dims({value}, {other})"
            lines.append(f"e{k} = {value} - lane")
        lines += [*self._hoisted(SCORE), f"keep = {result}"]
        if self.ends < 0:
            limit = f"edges[{len(self.edges)}] - lane"
            lines += ["if LIMITED:", f"    keep = keep & (place <= {limit})"]
        params = f"args, head, row, column, edges, b, h, q, kv, place{inputs}, QX: tl.constexpr"
        return self._define("body", f"{params}, LIMITED: tl.constexpr", [*lines, "return keep"])


def emit_mask(program: Program, target: Target, along: Axes = Axes.NONE) -> str:
    return gluon_module(*MaskWriter(program, target, along).functions())


@functools.lru_cache(maxsize=1024)
def is_of_edges(program: Program, target: Target) -> bool:
    """Whether a mask compares nothing but edges in the forward."""
    writer = MaskWriter(program, target, Axes.KV)
    return all(i in writer.forms or writer.levels[i] != SCORE for i in writer.written)


@functools.lru_cache(maxsize=1024)
def values_by_key(program: Program, target: Target) -> tuple[int, ...]:
    """The nodes whose values `column` of a mask's fragment gives in the forward, in order."""
    return tuple(MaskWriter(program, target, Axes.KV).column)
