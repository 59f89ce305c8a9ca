"""The statements of one generated function: nodes in dependency order, reductions as loops."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnloom.backends.cpu import emit_ops as ops
from attnloom.backends.cpu.emit_levels import Layout, runs_along
from attnloom.backends.cpu.emit_lines import Line
from attnloom.ir.node import INPUT_AXES, REDUCTION_AXES, Axes, DType
from attnloom.ir.passes.placement import Level

_REFERENCE = re.compile(r"\{(\d+)\}")
# How a function of each level calls the structs that it reads.
STRUCT_OF = {Level.HEAD: "H", Level.ROW: "R", Level.COLUMN: "C"}
_READS = {
    Level.HEAD: (),
    Level.ROW: (Level.HEAD,),
    Level.COLUMN: (Level.HEAD,),
    Level.SCORE: (Level.HEAD, Level.ROW, Level.COLUMN),
}


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a program's bindings start among those of the call, and the kernel's float type."""

    tensors: int
    numbers: int
    real: DType


class Body:
    """Collects the statements of a function of one level.

    `scalar`, `vector` and `value` give the expression of a node, emitting first what it needs.
    reads: the levels whose structs the function may read; normally those above its own.
    """

    def __init__(
        self, layout: Layout, slots: Slots, level: Level, reads: tuple[Level, ...] | None = None
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.level = level
        self.program = layout.program
        self.text: list[str] = []
        self.indent = 1
        self._known: dict[int, str] = {}
        self._outer: list[tuple[dict[int, str], Axes]] = []
        self._bound = Axes.NONE
        for above in _READS[level] if reads is None else reads:
            for index in layout.stored[above]:
                self._known[index] = self._stored(above, index)

    def line(self, text: str) -> None:
        self.text.append("    " * self.indent + text)

    def value(self, index: int) -> str:
        """The node as it is: a vector if it differs between keys, else a scalar."""
        found = self._find(index)
        if found is None:
            self.require(index)
            found = self._find(index)
            assert found is not None
        return found

    def vector(self, index: int) -> str:
        """The node in every lane."""
        text = self.value(index)
        if self.layout.is_vector(index):
            return text
        return ops.broadcast(text, self.program.nodes[index].dtype)

    def real_vector(self, index: int) -> str:
        """The node, a float, in every lane and in the kernel's float type."""
        dtype = self.program.nodes[index].dtype
        text = self.vector(index)
        return text if dtype is self.slots.real else f"CONVERT({text}, vf)"

    def along(self, index: int) -> str:
        """An index as the loads of kernels/capture.h take it where one of them is a Line."""
        line = self.layout.lines[index]
        if line is None:
            return f"Line{{{self.value(index)}, 0}}"
        return f"Line{{{self._expand(line.base)}, {self._expand(line.step)}}}"

    def indices(self, indices: tuple[int, ...]) -> str:
        """Arguments of a load or of a gradient's addition, each after a comma."""
        along = runs_along(self.program, self.layout.lines, indices)
        return "".join(f", {self.along(i) if along else self.value(i)}" for i in indices)

    def open_loop(self, axis: Axes) -> None:
        """Start a loop over a reduction axis; nodes that vary along it belong inside."""
        number = REDUCTION_AXES.index(axis)
        self.line(f"for (i64 r{number} = 0; r{number} < {self.length(axis)}; r{number}++) {{")
        self.indent += 1
        self._outer.append((self._known, self._bound))
        # Inside a loop over the same axis, its position was another one.
        self._known = {i: t for i, t in self._known.items() if not self.layout.inner(i) & axis}
        self._bound |= axis

    def close_loop(self) -> None:
        self.indent -= 1
        self.line("}")
        self._known, self._bound = self._outer.pop()

    def length(self, axis: Axes) -> str:
        slot, dim = self.program.reductions[REDUCTION_AXES.index(axis)]
        return f"M.tensors[{self.slots.tensors + slot}].size[{dim}]"

    def require(self, *indices: int) -> None:
        """Emit what the nodes need and that varies along no loop but the open ones."""
        found: set[int] = set()
        seen: set[int] = set()
        pending = list(indices)
        while pending:
            index = pending.pop()
            if index in seen or self._find(index) is not None:
                continue
            seen.add(index)
            if not self.layout.inner(index) & ~self._bound:
                found.add(index)
            pending += self.layout.needs(index)
        for index in sorted(found):
            self._emit(index)

    def _find(self, index: int) -> str | None:
        return self._known.get(index) or self._leaf(index)

    def _leaf(self, index: int) -> str | None:
        """Constants and inputs have names everywhere, but for the keys of the lanes."""
        node = self.program.nodes[index]
        if node.op == "const":
            return ops.constant(node.attr, node.dtype)
        name = str(node.attr)
        if node.op != "input" or name == "kv":
            return None
        if not INPUT_AXES[name] & Axes.KV:
            return ops.cast(DType.I64, node.dtype, False).format(name)
        same = node.dtype is self.slots.real
        return name if same else f"CONVERT({name}, {ops.VECTOR_TYPES[node.dtype]})"

    def _emit(self, index: int) -> None:
        node = self.program.nodes[index]
        if node.op == "reduce":
            self._emit_reduction(index)
            return
        types = ops.VECTOR_TYPES if self.layout.is_vector(index) else ops.SCALAR_TYPES
        name = f"n{index}"
        self.line(f"const {types[node.dtype]} {name} = {self._text(index)};")
        self._known[index] = name

    def _text(self, index: int) -> str:
        node, line = self.program.nodes[index], self.layout.lines[index]
        if line is not None:
            return self._line_text(line, node.dtype)
        if node.op == "number":
            slot = self.slots.numbers + int(str(node.attr))
            source = f"M.reals[{slot}]" if node.dtype.is_float else f"M.ints[{slot}]"
            if node.dtype is DType.BOOL:
                return f"({source} != 0)"
            return f"(float){source}" if node.dtype is DType.F32 else source
        if node.op == "load":
            return self._load_text(index)
        vector = self.layout.is_vector(index)
        first = self.program.nodes[node.args[0]]
        if node.op == "where":
            return self._where_text(node.args, vector)
        if node.op == "cast":
            template = ops.cast(first.dtype, node.dtype, vector)
        else:
            template = ops.operation(node, first.dtype, vector, not self.layout.tolerant[index])
        return template.format(*(self.vector(a) if vector else self.value(a) for a in node.args))

    def _where_text(self, args: tuple[int, ...], vector: bool) -> str:
        """A condition that is the same for every key picks one of two vectors as a whole."""
        condition, a, b = args
        if not self.layout.is_vector(condition):
            arms = [self.vector(i) if vector else self.value(i) for i in (a, b)]
            return f"({self.value(condition)} ? {arms[0]} : {arms[1]})"
        return f"select({self.vector(condition)}, {self.vector(a)}, {self.vector(b)})"

    def _line_text(self, line: Line, dtype: DType) -> str:
        vector = ops.VECTOR_TYPES[dtype]
        base, step = self._expand(line.base), self._expand(line.step)
        if step == "0":
            return f"splat<{vector}>({base})"
        lanes = f"lane_index<{vector}>()"
        if step not in ("1", "-1"):
            return f"splat<{vector}>({base}) + {lanes} * splat<{vector}>({step})"
        return f"splat<{vector}>({base}) {'+' if step == '1' else '-'} {lanes}"

    def _load_text(self, index: int) -> str:
        node = self.program.nodes[index]
        slot = int(str(node.attr))
        storage = ops.STORAGE_TYPES[str(self.program.tensors[slot].dtype)]
        tensor = f"M.tensors[{self.slots.tensors + slot}]"
        indices = self.indices(node.args)
        if not self.layout.is_vector(index):
            return f"load_one<{storage}>({tensor}{indices})"
        if runs_along(self.program, self.layout.lines, node.args):
            return f"load_line<{storage}>({tensor}{indices})"
        return f"load_lanes<{storage}>({tensor}{indices})"

    def _emit_reduction(self, index: int) -> None:
        node = self.program.nodes[index]
        kind, axis = node.attr  # type: ignore[misc]
        vector, dtype, name = self.layout.is_vector(index), node.dtype, f"n{index}"
        types = ops.VECTOR_TYPES if vector else ops.SCALAR_TYPES
        start = ops.neutral(kind, dtype, vector)
        if "ILANE" in start:  # torch's answer for no elements does not fit a narrow lane
            self.line(f"if (ILANE_BYTES == 4 && {self.length(axis)} <= 0) narrow_overflow() = 1;")
        start = ops.broadcast(start, dtype) if vector else start
        self.line(f"{types[dtype]} {name} = {start};")
        self.open_loop(axis)
        body = self.vector(node.args[0]) if vector else self.value(node.args[0])
        self.line(f"{name} = {ops.reducing(kind, dtype).format(name, body)};")
        self.close_loop()
        self._known[index] = name

    def _expand(self, text: str) -> str:
        return _REFERENCE.sub(lambda match: self.value(int(match[1])), text)

    def _stored(self, level: Level, index: int) -> str:
        struct = STRUCT_OF[level]
        if level is not Level.COLUMN:
            return f"{struct}.n{index}"
        vector = ops.VECTOR_TYPES[self.program.nodes[index].dtype]
        return f"load_as<{vector}>({struct}.n{index} + x)"
