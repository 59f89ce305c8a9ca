"""Emit the derivative of a score_mod as fragments of the backward kernels.

    head(args, b, h), row(args, head, b, h, q)      as in emit.py
    begin(ROWS) -> sums                             zeros, [ROWS, 1] for each sum that is carried
    body(args, sinks, head, row, b, h, q, kv, score, dscore, sums)
        -> (dL/d(score before the mod), sums)
    flush(args, sinks, head, row, b, h, q, sums, pid)   what leaves once the loop is over

Three kinds share these signatures:
    plain   the derivative by the score alone
    sinks   gradients of captured tensors too, for the kernel that walks queries with fixed keys
    rows    for the kernel that walks keys with fixed queries: those that are stored, and on demand
            the largest size of each other contribution, from which fixed-point scales follow

The `sinks` text is that of the program with q and kv exchanged: what depends on keys alone then
lies in `row` and is computed once a program. A contribution is reduced before it leaves a tile:

    index without q           summed over queries in registers, over the whole loop; then one
                              addition a key, or one for all keys if the index has no kv either
    index with q, without kv  summed over the keys of a tile, one addition a query
    index with both           one addition a score; where each score has its own element a store,
                              which the `rows` kind writes as the tensor lies
    index along a reduction   the same, without carrying, for every step of it

Lanes with dscore = 0, dead ones among them, contribute 0 whatever value they compute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from attnloom.backends.triton.emit import TYPES, Target, Writer, arg_index, module_text
from attnloom.backends.triton.layouts import VECTOR_BYTES, letters, position_name
from attnloom.ir.node import REDUCTION_AXES, Axes, Node, Program
from attnloom.ir.passes.gradient import Contribution, Gradient, gradient
from attnloom.ir.passes.simplify import simplify

_SINKS = "from attnloom.backends.triton import sinks as sk\n"
_EXCHANGED = {"q": "kv", "kv": "q"}
_R_AXES = Axes.R0 | Axes.R1 | Axes.R2 | Axes.R3
# Operations on floats that make no infinity of finite numbers, short of overflow.
_TAME = frozenset(
    "input const number load cast add sub mul neg abs sign min max where floor ceil round trunc "
    "sin cos tanh sigmoid erf atan asinh copysign".split()
)


@dataclass(frozen=True, slots=True)
class Sinks:
    """How contributions leave. stores: for each contribution whether it is a plain store.
    limbs: 64-bit integers an element of a fixed-point sum; 0 for floating atomics."""

    stores: tuple[bool, ...]
    limbs: int = 0


@functools.lru_cache(maxsize=1024)
def exchanged(program: Program) -> Program:
    """The program of (kv, q) where the given one is of (q, kv)."""

    def turn(node: Node) -> Node:
        if node.op != "input":
            return node
        return replace(node, attr=_EXCHANGED.get(str(node.attr), node.attr))

    return replace(program, nodes=tuple(turn(node) for node in program.nodes))


@functools.lru_cache(maxsize=1024)
def gradient_of(program: Program, exact: bool) -> Gradient:
    return gradient(program, exact)


def is_tame(program: Program) -> bool:
    """Whether the derivative by the score is finite wherever the score is, so that it may be
    applied to probabilities (backward.early_gradient)."""
    found = simplify(replace(program, outputs=program.outputs[:1]), exact=True)
    return all(node.op in _TAME for node in found.nodes if node.dtype.is_float)


def positions_of(program: Program, item: Contribution) -> tuple[str | None, ...]:
    """For each dimension of a contribution's index the position it is: b, h, q, kv, or None."""
    return tuple(position_name(program, index) for index in item.index)


def index_axes(program: Program, item: Contribution) -> Axes:
    """What the place of a contribution depends on."""
    axes = Axes.NONE
    for index in item.index:
        axes |= program.axes[index]
    return axes


def emit_plain(found: Gradient, target: Target, exact: bool, swap: bool) -> str:
    """The derivative by the score; `swap` exchanges q and kv."""
    program = simplify(replace(found.program, outputs=found.program.outputs[:1]), exact)
    return module_text(
        _SINKS, _GradWriter(exchanged(program) if swap else program, "plain", target, ()).fragment()
    )


def emit_sinks(found: Gradient, target: Target, sinks: Sinks) -> str:
    """All contributions but those stored, q and kv exchanged."""
    writer = _SinkWriter(exchanged(found.program), "sinks", target, found.contributions)
    writer.sinks = sinks
    return module_text(_SINKS, writer.fragment())


def emit_rows(found: Gradient, target: Target, sinks: Sinks, peaks: bool) -> str:
    """Stored contributions, to sinks[1 + their number]. With peaks the largest absolute ones of the
    others too; flush stores them at sinks[0] + pid * the number of all contributions."""
    writer = _RowWriter(found.program, "rows", target, ())
    writer.peaks, writer.stores = peaks, sinks.stores
    writer.set_items(found.contributions)
    return module_text(_SINKS, writer.fragment())


class Contributions(Writer):
    """The part of a writer that gradients of captured tensors share: their values in a tile and
    where they belong.

    real: the type of gradients. carried: numbers of the items whose sums a kernel carries along.
    Subclasses say how a value leaves a tile (`_leave`), and have fragments of their own.
    """

    real: str
    items: tuple[Contribution, ...]
    carried: list[int]

    def _contributions(self) -> list[str]:
        if not self.items:
            return []
        lines = ["live = dscore != 0"]
        lines += [f"t{n} = sums[{i}]" for i, n in enumerate(self.carried)]
        for number, item in enumerate(self.items):
            self._loops(number, item, lines)
        return lines

    def _loops(self, number: int, item: Contribution, lines: list[str]) -> None:
        """One contribution, inside loops over the reduction axes that it varies along."""
        indent = ""
        opened = Axes.NONE
        roots = (*item.index, item.value)
        for axis in (a for a in REDUCTION_AXES if a & item.axes):
            which = REDUCTION_AXES.index(axis)
            slot, dim = self.program.reductions[which]
            length = f"dm.whole32(args, {arg_index(self.program, slot) + 1 + 3 * dim})"
            lines.append(f"{indent}for r{which} in range(0, {length}):")
            indent += "    "
            opened |= axis
            for i in self._under(roots, axis, opened):
                self._statement(i, self.program.nodes[i], lines, indent)
        # a reduced value is always a float; a name alone may be one of a lower rank
        value = f"tl.cast({self._name(item.value)}, {self.real})"
        if self.program.nodes[item.value].op != "input":
            # dscore itself is 0 where nothing is live
            value = f"tl.where(live, {value}, 0.0)"
        lines.append(f"{indent}d{number} = {value}")
        lines += [indent + line for line in self._leave(number, item)]

    def _under(self, roots: tuple[int, ...], axis: Axes, opened: Axes) -> list[int]:
        """Nodes under the roots that vary along the axis and along no loop that is not open."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack.extend(self.program.nodes[i].args)
        axes = self.program.axes
        return sorted(i for i in found if axes[i] & axis and not axes[i] & _R_AXES & ~opened)

    def _leave(self, number: int, item: Contribution) -> list[str]:
        raise NotImplementedError

    def _index_axes(self, item: Contribution) -> Axes:
        return index_axes(self.program, item)

    def _offset(self, item: Contribution) -> str:
        """Of an element in a contiguous buffer of the tensor's shape."""
        base = arg_index(self.program, item.slot)
        whole = "whole" if self.target.wide else "whole32"
        offset = "0"
        for d, index in enumerate(item.index):
            size = f"dm.{whole}(args, {base + 1 + 3 * d})"
            term = f"dm.clamp_index({self._name(index)}, {size})"
            offset = term if d == 0 else f"(({offset}) * {size} + {term})"
        return offset


class _GradWriter(Contributions):
    """The plain kind; the others override how contributions are treated."""

    def __init__(
        self, program: Program, prefix: str, target: Target, items: tuple[Contribution, ...]
    ) -> None:
        super().__init__(program, prefix, target)
        self.real = TYPES[program.nodes[program.outputs[0]].dtype]
        self.set_items(items)

    def set_items(self, items: tuple[Contribution, ...]) -> None:
        self.items = items
        self.carried = [n for n, item in enumerate(items) if self._carries(item)]

    def fragment(self) -> str:
        head, row = self._unpack("head"), self._unpack("row")
        zero = f"tl.full((), 0.0, {self.real})"
        zeros = [f"tl.zeros([ROWS, 1], {self.real})"] * len(self.carried) or [zero]
        body = head + row + self._hoisted(2) + self._contributions()
        results = [self._name(self.program.outputs[0]), self._tuple(self._sums())]
        signature = "args, sinks, head, row, b, h, q"
        return "\n\n".join(
            (
                self._function("head", "args, b, h", self._hoisted(0), self.head),
                self._function("row", "args, head, b, h, q", head + self._hoisted(1), self.row),
                self._define("begin", "ROWS: tl.constexpr", [f"return {self._tuple(zeros)}"]),
                self._define(
                    "body",
                    f"{signature}, kv, score, dscore, sums",
                    [*body, f"return {', '.join(results)}"],
                ),
                self._define(
                    "flush", f"{signature}, sums, pid", head + row + self._flush() or ["pass"]
                ),
            )
        )

    @staticmethod
    def _tuple(names: list[str]) -> str:
        return "(" + "".join(n + ", " for n in names) + ")"

    def _carries(self, item: Contribution) -> bool:
        return False

    def _sums(self) -> list[str]:
        return [f"t{n}" for n in self.carried] or ["sums[0]"]

    def _flush(self) -> list[str]:
        return []

    def _store(self, number: int, item: Contribution, sink: str) -> list[str]:
        """To an element of its own: positions are inside but for the overhang of the last tiles."""
        base = arg_index(self.program, item.slot)
        inside = " & ".join(
            f"({self._name(i)} < dm.whole32(args, {base + 1 + 3 * d}))"
            for d, i in enumerate(item.index)
            if self.program.axes[i] & (Axes.Q | Axes.KV)
            and letters(self.target.layouts, item.slot, d)[0] != "i"
        )
        mask = f", mask={inside}" if inside else ""
        value = f"d{number}.to({sink}.dtype.element_ty)"
        return [f"tl.store({sink} + {self._own_offset(item)}, {value}{mask})"]

    def _own_offset(self, item: Contribution) -> str:
        """`_offset` without clamping; rows of whole vectors where the tensor's are."""
        base = arg_index(self.program, item.slot)
        unit = VECTOR_BYTES // self.program.tensors[item.slot].dtype.itemsize
        offset = self._name(item.index[0])
        for d, index in enumerate(item.index[1:], 1):
            size = f"dm.whole32(args, {base + 1 + 3 * d})"
            if letters(self.target.layouts, item.slot, d)[2] == "m":
                size = f"({size} // {unit} * {unit})"
            offset = f"(({offset}) * {size} + {self._name(index)})"
        return offset


class _SinkWriter(_GradWriter):
    """Gradients of captured tensors. Axes are those of the exchanged program: KV is the query."""

    sinks: Sinks

    def _carries(self, item: Contribution) -> bool:
        return not item.axes and not self._index_axes(item) & Axes.KV

    def _loops(self, number: int, item: Contribution, lines: list[str]) -> None:
        if not self.sinks.stores[number]:
            super()._loops(number, item, lines)

    def _leave(self, number: int, item: Contribution) -> list[str]:
        if number in self.carried:
            return [f"t{number} += tl.sum(d{number}, 1, keep_dims=True)"]
        axes = self._index_axes(item)
        value = f"d{number}"
        if not axes & Axes.KV:
            value = f"tl.sum({value}, 1, keep_dims=True)"
        if not axes & Axes.Q:
            value = f"tl.sum({value}, 0, keep_dims=True)"
        return [self._add(number, item, value)]

    def _flush(self) -> list[str]:
        lines = []
        for at, number in enumerate(self.carried):
            item = self.items[number]
            value = f"sums[{at}]"
            if not self._index_axes(item) & Axes.Q:
                value = f"tl.sum({value}, 0, keep_dims=True)"
            lines.append(self._add(number, item, value))
        return lines

    def _add(self, number: int, item: Contribution, value: str) -> str:
        limbs = self.sinks.limbs
        if not limbs:
            return f"sk.add(sinks[{number}], {self._offset(item)}, {value})"
        scales = f"sinks[{len(self.items)}] + {2 * number}"
        return f"sk.add_fixed(sinks[{number}], {self._offset(item)}, {value}, {scales}, {limbs})"


class _RowWriter(_GradWriter):
    """Stores, and sizes of all other contributions, those inside reductions too."""

    peaks: bool
    stores: tuple[bool, ...]

    def _carries(self, item: Contribution) -> bool:
        return self.peaks

    def _loops(self, number: int, item: Contribution, lines: list[str]) -> None:
        if self.peaks or self.stores[number]:
            super()._loops(number, item, lines)

    def _leave(self, number: int, item: Contribution) -> list[str]:
        if self.stores[number]:
            return self._store(number, item, f"sinks[{number + 1}]")
        size = f"tl.max(sk.size_of(d{number}), 1, keep_dims=True)"
        return [f"t{number} = tl.maximum(t{number}, {size})"]

    def _flush(self) -> list[str]:
        count = len(self.carried)
        return [
            f"tl.store(sinks[0] + pid * {count} + {i}, tl.max(tl.max(sums[{i}], 1), 0))"
            for i in range(count)
        ]
