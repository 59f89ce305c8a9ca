"""Turn programs into the jit functions ("fragments") that the Triton kernels call.

A kernel passes positions that broadcast: `q` is [TILE_M, 1] and `kv` [1, TILE_N] in the forward,
[1, TILE_M] and [TILE_N, 1] where scores are transposed; `b` and `h` are scalars or, in decode,
[TILE_M, 1]. So a value that depends on the row alone has the shape of a row by itself, and the only
placement left to do by hand is to lift values out of the key loop:

    head(args, b, h) -> tuple               what depends on b and h
    row(args, head, b, h, q) -> tuple       what depends on q: once a tile row
    body(args, head, row, b, h, q, kv, ...) the rest: columns [1, TILE_N] and scores

`args` is one flat tuple: for every captured tensor its pointer, sizes and strides (elements), then
the numbers; sizes, strides and numbers are three floats each (packed.py). Names come from node
numbers only; nothing that a user wrote reaches the text.

Integers: positions are 32 bits wide and so is what is computed from them, unless Target.wide;
captured 64-bit integers stay 64 bits wide where their size is not known (layouts.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.layouts import VECTOR_BYTES, is_narrow, letters
from attnloom.ir.node import Axes, DType, Node, Program
from attnloom.ir.passes.bounds import small_integers

TYPES = {
    DType.BOOL: "tl.int1",
    DType.U8: "tl.uint8",
    DType.I8: "tl.int8",
    DType.I16: "tl.int16",
    DType.I32: "tl.int32",
    DType.I64: "tl.int64",
    DType.F32: "tl.float32",
    DType.F64: "tl.float64",
}

_BITS = {DType.U8: 8, DType.I8: 8, DType.I16: 16, DType.I32: 32, DType.I64: 64}

# op -> expression of its operands; {t} is the Triton type of the result.
_EXPRESSIONS: dict[str, str] = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sign": "dm.sign({0})",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "shl": "dm.shift_left({0}, {1}, {bits})",
    "shr": "dm.shift_right({0}, {1}, {bits})",
    "where": "tl.where({0}, {1}, {2})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "dm.round_even({0})",
    "trunc": "dm.trunc({0})",
    "exp": "dm.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "dm.expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "dm.log1p({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tan": "lib.tan({0})",
    "asin": "lib.asin({0})",
    "acos": "lib.acos({0})",
    "atan": "lib.atan({0})",
    "atan2": "lib.atan2({0}, {1})",
    "sinh": "dm.sinh({0})",
    "cosh": "dm.cosh({0})",
    "tanh": "dm.tanh_exact({0})",
    "asinh": "lib.asinh({0})",
    "acosh": "lib.acosh({0})",
    "atanh": "lib.atanh({0})",
    "sigmoid": "dm.sigmoid({0})",
    "erf": "tl.erf({0})",
    "erfc": "lib.erfc({0})",
    "pow": "lib.power({0}, {1})",
    "reciprocal": "(1.0 / {0})",
    "isnan": "({0} != {0})",
    "isinf": "dm.isinf({0})",
    "isfinite": "dm.isfinite({0})",
    "copysign": "dm.copysign({0}, {1})",
    "cast": "tl.cast({0}, {t})",
}
# The same for operands that are integers, where the two differ.
_INTEGER = {
    "floordiv": "dm.floordiv({0}, {1})",
    "mod": "dm.mod({0}, {1})",
    "fmod": "dm.fmod_int({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "max": "tl.maximum({0}, {1})",
    "not": "(~{0})",
    "truncdiv": "dm.truncdiv({0}, {1})",
    "pow": "dm.pow_int({0}, {1})",
    "floor": "{0}",
    "ceil": "{0}",
    "round": "{0}",
    "trunc": "{0}",
    "isinf": "({0} != {0})",
    "isfinite": "({0} == {0})",
}
_FLOAT = {
    "floordiv": "tl.floor({0} / {1})",
    "mod": "dm.mod_float({0}, {1})",
    "fmod": "dm.fmod_float({0}, {1})",
    "truncdiv": "dm.trunc({0} / {1})",
}
# float64, and float32 under exact_math: the device library instead of short formulas.
_LIBRARY = {
    name: f"lib.{name}({{0}})"
    for name in "exp expm1 log1p tanh sinh cosh log log2 exp2 erf sqrt".split()
} | {
    "rsqrt": "(1.0 / lib.sqrt({0}))",
    "sigmoid": "(1.0 / (1.0 + lib.exp(-{0})))",
}
_REDUCERS = {
    "sum": "({0} + {1})",
    "prod": "({0} * {1})",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "any": "({0} | {1})",
    "all": "({0} & {1})",
}
_NUMBERS = {DType.F32: "args[{0}]", DType.F64: "dm.double(args, {0})"}
_R_AXES = Axes.R0 | Axes.R1 | Axes.R2 | Axes.R3
NEAR = 1 << 21
_SMALL = 1 << 22  # what device_math.small_to_float takes


@dataclass(frozen=True, slots=True)
class Target:
    """What the text may use.

    tanh_ptx: the device has tanh.approx and the caller allows it.
    wide: positions, what is computed from them or offsets into captured tensors may pass 2**31.
    exact: no approximation beyond a few units in the last place.
    near: positions, and b and h, lie within +-NEAR.
    layouts: of captured tensors, see layouts.py; () where nothing is known.
    lines, streamed: how Gluon kernels move elements of single scores, see gluon/pieces.py.
    """

    tanh_ptx: bool = False
    wide: bool = False
    exact: bool = False
    near: bool = False
    layouts: tuple[str, ...] = ()
    lines: bool = False
    streamed: bool = False

    def reading(self, layouts: tuple[str, ...]) -> Target:
        """The same for tensors of these layouts."""
        return replace(self, layouts=layouts)


def arg_index(program: Program, slot: int) -> int:
    """Position in `args` of the pointer of a captured tensor; sizes, then strides follow it."""
    return sum(1 + 6 * t.rank for t in program.tensors[:slot])


def number_index(program: Program, slot: int) -> int:
    return arg_index(program, len(program.tensors)) + 3 * slot


class Writer:
    """Writes the functions of one program under a common prefix."""

    deepest = 2  # the level of `body`

    def __init__(self, program: Program, prefix: str, target: Target) -> None:
        self.program = program
        self.prefix = prefix
        self.target = target
        self.levels = [self.level_of(a) for a in program.axes]
        self.small = small_integers(program, NEAR, _SMALL) if target.near else frozenset()
        self.reads = [node.args for node in program.nodes]
        self.find_across()

    def find_across(self) -> None:
        """What outer levels compute for deeper ones, by `levels` and `reads`."""
        self.across = _uses_across(self.program, self.levels, self.reads, self.deepest)
        self.head = [i for i in self.across if self.levels[i] == 0]
        self.row = [i for i in self.across if self.levels[i] == 1]

    @staticmethod
    def level_of(axes: Axes) -> int:
        """0: head, 1: row, 2: column or score."""
        if axes & Axes.KV:
            return 2
        return 1 if axes & Axes.Q else 0

    def text(self, outputs: tuple[int, ...], inputs: str) -> str:
        return "\n\n".join(
            (
                self._function("head", "args, b, h", self._hoisted(0), self.head),
                self._function(
                    "row", "args, head, b, h, q", self._unpack("head") + self._hoisted(1), self.row
                ),
                self._function(
                    "body",
                    f"args, head, row, b, h, q, kv{inputs}",
                    self._unpack("head") + self._unpack("row") + self._hoisted(2),
                    outputs,
                    single=len(outputs) == 1,
                ),
            )
        )

    def _function(self, name, params, lines, results, single=False) -> str:
        # an empty tuple is not a Triton value, so that there is always one element
        names = [self._name(i) for i in results]
        result = names[0] if single else "(" + "".join(n + ", " for n in names or ["0"]) + ")"
        return self._define(name, params, [*lines, f"return {result}"])

    def _define(self, name: str, params: str, lines: list[str]) -> str:
        if self.target.wide:
            positions = [p for p in ("b", "h", "q", "kv") if p in params.split(", ")]
            lines = [f"{p} = tl.cast({p}, tl.int64)" for p in positions] + lines
        body = "\n".join("    " + line for line in lines)
        return f"@triton.jit\ndef {self.prefix}_{name}({params}):\n{body}\n"

    def _unpack(self, level: str) -> list[str]:
        return [f"v{n} = {level}[{i}]" for i, n in enumerate(getattr(self, level))]

    def _hoisted(self, level: int) -> list[str]:
        """Statements of a level, in order; what lies inside a reduction is written by its loop."""
        lines: list[str] = []
        for i, node in enumerate(self.program.nodes):
            if self.levels[i] == level and not self.program.axes[i] & _R_AXES:
                self._statement(i, node, lines, "")
        return lines

    def _statement(self, i: int, node: Node, lines: list[str], indent: str) -> None:
        if node.op in ("input", "const", "number"):
            return
        if node.op == "reduce":
            self._reduce(i, node, lines, indent)
        elif node.op == "load":
            self._load(i, node, lines, indent)
        else:
            lines.append(f"{indent}v{i} = {self._expression(node)}")

    def _expression(self, node: Node) -> str:
        table = _EXPRESSIONS
        operand = self.program.nodes[node.args[0]].dtype
        if node.op in _INTEGER and not operand.is_float:
            table = _INTEGER
        elif node.op in _FLOAT and operand.is_float:
            table = _FLOAT
        text = table[node.op]
        if node.op == "cast" and node.dtype is DType.F32 and node.args[0] in self.small:
            text = "dm.small_to_float({0})"
        elif node.op == "tanh" and self.target.tanh_ptx and node.dtype is DType.F32:
            text = "dm.tanh_ptx({0})"
        elif node.op in _LIBRARY and (self.target.exact or node.dtype is DType.F64):
            text = _LIBRARY[node.op]
        names = (self._name(a) for a in node.args)
        return text.format(*names, t=TYPES[node.dtype], bits=_BITS.get(node.dtype, 0))

    def _load(self, i: int, node: Node, lines: list[str], indent: str) -> None:
        slot = int(node.attr)  # type: ignore[call-overload]
        base = arg_index(self.program, slot)
        rank = self.program.tensors[slot].rank
        whole, widen = ("whole", ".to(tl.int64)") if self.target.wide else ("whole32", "")
        offset = ""
        for d, arg in enumerate(node.args):
            inside, step, _ = letters(self.target.layouts, slot, d)
            term = self._name(arg)
            if inside != "i":
                size = f"dm.{whole}(args, {base + 1 + 3 * d})"
                term = f"dm.clamp_index({term}, {size})"
            if step != "1":
                stride = f"dm.{whole}(args, {base + 1 + 3 * (rank + d)})"
                if step == "v":
                    unit = VECTOR_BYTES // self.program.tensors[slot].dtype.itemsize
                    # said by arithmetic that strides are aligned, see tiles.py
                    stride = f"({stride} // {unit} * {unit})"
                term = f"{term}{widen} * {stride}"
            offset += f" + {term}"
        narrow = is_narrow(self.target.layouts, slot) and not self.target.wide
        loaded = "tl.int32" if narrow else TYPES[node.dtype]
        lines.append(f"{indent}v{i} = tl.load(args[{base}]{offset}).to({loaded})")

    def _reduce(self, i: int, node: Node, lines: list[str], indent: str) -> None:
        """acc = body(0); for r in 1 .. length: acc = acc (+) body(r)."""
        kind, axis = node.attr  # type: ignore[misc]
        which = int(axis).bit_length() - int(Axes.R0).bit_length()
        slot, dim = self.program.reductions[which]
        length = f"dm.whole32(args, {arg_index(self.program, slot) + 1 + 3 * dim})"
        cone = self._cone(node.args[0], axis, self.program.axes[i] | axis)
        body = self._name(node.args[0])
        lines.append(f"{indent}r{which} = 0")
        self._cone_statements(cone, lines, indent)
        lines.append(f"{indent}v{i} = {body}")
        lines.append(f"{indent}for r{which} in range(1, {length}):")
        self._cone_statements(cone, lines, indent + "    ")
        lines.append(f"{indent}    v{i} = {_REDUCERS[kind].format(f'v{i}', body)}")

    def _cone_statements(self, cone: list[int], lines: list[str], indent: str) -> None:
        for j in cone:
            self._statement(j, self.program.nodes[j], lines, indent)

    def _cone(self, root: int, axis: Axes, opened: Axes) -> list[int]:
        """Nodes under `root` that depend on the axis and on no axis but the opened ones: inner
        reductions are written by themselves."""
        found: set[int] = set()
        stack = [root]
        while stack:
            j = stack.pop()
            if j in found or not self.program.axes[j] & axis:
                continue
            found.add(j)
            stack.extend(self.program.nodes[j].args)
        return sorted(j for j in found if not self.program.axes[j] & _R_AXES & ~opened)

    def _name(self, i: int) -> str:
        node = self.program.nodes[i]
        if node.op == "input":
            return str(node.attr)
        if node.op == "const":
            return self.literal(node)
        if node.op == "number":
            at = number_index(self.program, int(node.attr))  # type: ignore[call-overload]
            integer = "dm.whole(args, {0})" if self.target.wide else "dm.whole32(args, {0})"
            return _NUMBERS.get(node.dtype, integer).format(at)
        return f"v{i}"

    @staticmethod
    def typed(value: str, dtype: str) -> str:
        """A scalar of a Triton type: a bare literal among literals would be taken as float32."""
        return f"tl.full((), {value}, {dtype})"

    def literal(self, node: Node) -> str:
        value = node.attr
        if isinstance(value, bool):
            return self.typed(str(int(value)), "tl.int1")
        if node.dtype.is_float:
            number = float(value)  # type: ignore[arg-type]
            text = repr(number) if math.isfinite(number) else f"float('{number!r}')"
            return self.typed(text, "tl.float64") if node.dtype is DType.F64 else text
        return repr(int(value))  # type: ignore[call-overload]


def _uses_across(
    program: Program, levels: list[int], reads: list[tuple[int, ...]], deepest: int
) -> list[int]:
    """Nodes that a deeper level reads, and that are worth a register.

    Steps of a reduction are written where the reduction is, which may be at the deepest level."""
    used = {
        a
        for i, args in enumerate(reads)
        for a in args
        if levels[i] > levels[a] or program.axes[i] & _R_AXES
    } | {o for o in program.outputs if levels[o] < deepest}
    leaves = ("input", "const", "number")
    return sorted(
        i for i in used if program.nodes[i].op not in leaves and not program.axes[i] & _R_AXES
    )


_HEADER = """import triton
import triton.language as tl

from attnloom.backends.triton import device_math as dm
from attnloom.backends.triton import {library} as lib


"""


def emit_score(program: Program, target: Target) -> str:
    """score_head, score_row and score_body(args, head, row, b, h, q, kv, score) -> score."""
    return Writer(program, "score", target).text(program.outputs, ", score")


def emit_mask(program: Program, target: Target) -> str:
    """mask_head, mask_row and mask_body(args, head, row, b, h, q, kv) -> bool."""
    return Writer(program, "mask", target).text(program.outputs, "")


def module_text(*parts: str) -> str:
    library = "library_numpy" if INTERPRETED else "library"
    return _HEADER.format(library=library) + "\n\n".join(parts)
