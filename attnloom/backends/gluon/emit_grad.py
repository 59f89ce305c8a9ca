"""Emit the derivative of a score_mod as fragments of the Gluon backward (contract: fragments.py).

    head(args, b, h), row(args, head, b, h, q), column(args, head, b, h, kv)
    begin(KEYS, LAYOUT) -> sums         zeros, a vector of keys for each sum that is carried
    pieces(args, head, b, h, q, kv, N, QX)      q and kv: the first ones of a tile
    body(args, sinks, head, row, column, pieces, first, b, h, q, kv, score, dscore, sums, QX)
        -> (dL/d(score before the mod), sums)   first: those that `pieces` takes
    flush(args, sinks, head, column, b, h, kv, sums)    what leaves once the queries are over

Two kinds, as in backends/triton/emit_grad.py: `plain`, the derivative by the score alone, and
`sinks`, gradients of captured tensors too. How a contribution leaves is told there; kernels that
use these fragments own keys and walk queries.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from attnloom.backends.gluon.emit import SCORE, LevelWriter, gluon_module
from attnloom.backends.triton.emit import Target, arg_index
from attnloom.backends.triton.emit_grad import Contributions, Sinks, gradient_of, positions_of
from attnloom.backends.triton.fragments import load_module
from attnloom.backends.triton.layouts import VECTOR_BYTES, letters
from attnloom.ir.node import Axes, Program
from attnloom.ir.passes.gradient import Contribution, Gradient
from attnloom.ir.passes.simplify import simplify

_IMPORTS = (
    "from triton.experimental.gluon import language as gl\n"
    "from attnloom.backends.gluon import sinks as sk\n"
)
PARTS = ("head", "row", "column", "pieces", "begin", "body", "flush")


@functools.lru_cache(maxsize=1024)
def gradient_fragment(
    score: Program, target: Target, exact: bool, sinks: Sinks | None
) -> dict[str, Any]:
    """Fields GRAD_HEAD, GRAD_ROW, ... of a kernel's configuration."""
    found = gradient_of(score, exact)
    if sinks is None:
        writer = GradWriter(slope_program(found, exact), "plain", target, (), None)
    else:
        writer = GradWriter(found.program, "sinks", target, found.contributions, sinks)
    module = load_module(writer.module())
    return {f"GRAD_{part.upper()}": getattr(module, f"{writer.prefix}_{part}") for part in PARTS}


def slope_program(found: Gradient, exact: bool) -> Program:
    """The derivative by the score alone."""
    return simplify(replace(found.program, outputs=found.program.outputs[:1]), exact)


class GradWriter(LevelWriter, Contributions):
    """Writes one kind. sinks: how contributions leave; None if there are none."""

    def __init__(
        self,
        program: Program,
        prefix: str,
        target: Target,
        items: tuple[Contribution, ...],
        sinks: Sinks | None,
    ) -> None:
        super().__init__(program, prefix, target)
        self.real = "tl.float32"
        self.items = items
        self.sinks = sinks
        self.leaving: list[str] = []
        self.carried = [
            n for n, item in enumerate(items) if not (item.axes or self._index_axes(item) & Axes.Q)
        ]

    def module(self) -> str:
        zeros = "gl.zeros([KEYS], tl.float32, LAYOUT), " * len(self.carried) or "0.0, "
        output = self.program.outputs[0]
        pieces = self.pieces()
        grad = self._name(output)
        if self.levels[output] != SCORE:
            grad = f"tl.where(dscore > float('inf'), dscore, {grad})"
        sums = "".join(f"t{n}, " for n in self.carried) or "sums[0], "
        body = [*self.expanded(), *self._hoisted(SCORE), *self._contributions()]
        flush = [*self._unpack("head"), *self._unpack("column"), *self._flush()]
        names = "args, sinks, head, row, column, pieces, first, b, h, q, kv, score, dscore, sums"
        return gluon_module(
            _IMPORTS,
            *self.outer(),
            *pieces,
            *self.leaving,
            self._define(
                "begin", "KEYS: tl.constexpr, LAYOUT: tl.constexpr", [f"return ({zeros})"]
            ),
            self._define("body", f"{names}, QX: tl.constexpr", [*body, f"return {grad}, ({sums})"]),
            self._define("flush", "args, sinks, head, column, b, h, kv, sums", [*flush, "pass"]),
        )

    def _leave(self, number: int, item: Contribution) -> list[str]:
        """Out of a tile. Queries lie along dimension 1 - QX, keys along QX."""
        assert self.sinks is not None
        if number in self.carried:
            return [f"t{number} += tl.sum(d{number}, 1 - QX)"]
        if self.sinks.stores[number]:
            return self._store(number, item)
        axes = self._index_axes(item) & (Axes.Q | Axes.KV)
        value, offset, add = f"d{number}", self._offset(item), "add"
        if not axes:
            value, add = f"tl.sum(tl.sum({value}, 1), 0)", "add_one"
        elif axes != Axes.Q | Axes.KV:
            missing = "QX" if axes == Axes.Q else "1 - QX"
            value, offset = f"tl.sum({value}, {missing})", f"sk.vector({offset}, {missing})"
        return [f"sk.{add}(sinks[{number}], {offset}, {value})"]

    def _flush(self) -> list[str]:
        lines = []
        for at, number in enumerate(self.carried):
            item = self.items[number]
            value, add = f"sums[{at}]", "add"
            if not self._index_axes(item) & Axes.KV:
                value, add = f"tl.sum({value}, 0)", "add_one"
            lines.append(f"sk.{add}(sinks[{number}], {self._offset(item)}, {value})")
        return lines

    def _store(self, number: int, item: Contribution) -> list[str]:
        if self._leaves_in_pieces(item):
            self.leaving.append(self._leave_in_pieces(number, item))
            given = f"args, sinks, first[0], first[1], b, h, d{number}, QX"
            return [f"{self.prefix}_leave{number}({given})"]
        base = arg_index(self.program, item.slot)
        # the last tiles overhang the lengths; b and h never do
        inside = " & ".join(
            f"({self._name(i)} < dm.whole32(args, {base + 1 + 3 * d}))"
            for d, i in enumerate(item.index)
            if self.program.axes[i] & (Axes.Q | Axes.KV)
        )
        pointer = f"sk.places(sinks[{number}], {self._offset(item)}, d{number})"
        value = f"d{number}.to(sinks[{number}].dtype.element_ty)"
        return [f"tl.store({pointer}, {value}, mask={inside})"]

    def _leaves_in_pieces(self, item: Contribution) -> bool:
        """Whether rows of a stored gradient, which lies contiguously, are whole pieces of keys."""
        last = len(item.index) - 1
        layouts = self.target.layouts
        return (
            bool(layouts)
            and positions_of(self.program, item)[last] == "kv"
            and letters(layouts, item.slot, last)[2] == "m"
        )

    def _leave_in_pieces(self, number: int, item: Contribution) -> str:
        """The function that stores a tile; q and kv are its first positions. Offsets fit 32 bits,
        see captured.py."""
        base, unit = arg_index(self.program, item.slot), self._unit(item.slot)
        names = [str(name) for name in positions_of(self.program, item)]
        sizes = [f"dm.whole32(args, {base + 1 + 3 * d})" for d in range(len(names))]
        sizes[-1] = f"{sizes[-1]} // {unit} * {unit}"
        row = names[0] if names[:-1] else "0"
        for name, size in zip(names[1:-1], sizes[1:-1], strict=True):
            row = f"({row} * {size} + {name})"
        inside = [
            f"({name} < {size})"
            for d, (name, size) in enumerate(zip(names, sizes, strict=True))
            if name in ("q", "kv") and letters(self.target.layouts, item.slot, d)[0] != "i"
        ]
        mask = f", mask={' & '.join(inside)}" if inside else ""
        if self.target.streamed:
            mask += ', eviction_policy="evict_first"'
        sink = f"sinks[{number}]"
        lines = [
            f"found = pc.gathered(value, QX, {sink}.dtype.element_ty, {self.target.lines})",
            "q, kv = pc.positions("
            f"q, kv, value.shape[1], QX, {VECTOR_BYTES // unit}, {self.target.lines})",
            f"tl.store({sink} + {row} * ({sizes[-1]}) + kv, found{mask})",
        ]
        return self._define(
            f"leave{number}", "args, sinks, q, kv, b, h, value, QX: tl.constexpr", lines
        )
