"""Turn programs into the jit functions that Gluon kernels call. The contract: fragments.py.

The text is that of the Triton fragments (backends/triton/emit.py): Triton's elementwise functions
compile in Gluon kernels as they are, and take the layouts of their operands. What differs is where
values live. A tensor has a layout here, and a value of shape [M, 1] has a copy of itself for each
column that its thread holds: loads would be repeated that often. So values by row and by column are
computed in one dimension, where a thread holds each once, and expanded where scores are.

Loads of what each score has to itself, `bias[b, h, q, kv]`, are functions of their own (`pieces`)
where the target knows the layouts of captured tensors and neighbours along kv are neighbours in
memory, rows of whole pieces: they need the first positions of a tile alone, so that a kernel may
start them before there are scores. Other such loads are part of `body`, lane by lane.
"""

from __future__ import annotations

from attnloom.backends.triton.emit import TYPES, Target, Writer, arg_index, module_text
from attnloom.backends.triton.layouts import VECTOR_BYTES, is_narrow, letters, position_name
from attnloom.ir.node import Axes, Node, Program

_IMPORTS = (
    "from attnloom.backends.gluon import builtins as bi\n"
    "from attnloom.backends.gluon import pieces as pc\n"
)
_HEAD, ROW, _COLUMN, SCORE = range(4)


class LevelWriter(Writer):
    """Writes head, row, column and body of a program, each with values of its own level."""

    deepest = SCORE

    def __init__(self, program: Program, prefix: str, target: Target) -> None:
        super().__init__(program, prefix, target)
        self.in_pieces: list[int] = []

    def find_across(self) -> None:
        super().find_across()
        self.column = [i for i in self.across if self.levels[i] == _COLUMN]

    @staticmethod
    def level_of(axes: Axes) -> int:
        """0: head, 1: row, 2: column, 3: score."""
        return (_COLUMN if axes & Axes.KV else _HEAD) + (ROW if axes & Axes.Q else _HEAD)

    def outer(self) -> tuple[str, str, str]:
        """head, row and column."""
        head = self._unpack("head")
        return (
            self._function("head", "args, b, h", self._hoisted(_HEAD), self.head),
            self._function("row", "args, head, b, h, q", head + self._hoisted(ROW), self.row),
            self._function(
                "column", "args, head, b, h, kv", head + self._hoisted(_COLUMN), self.column
            ),
        )

    def pieces(self) -> tuple[str, ...]:
        """Functions of single loads, and `pieces`, which calls them; `body` then takes what it
        gives."""
        self.in_pieces = [i for i in range(len(self.program.nodes)) if self._comes_in_pieces(i)]
        calls: list[str] = []
        lines = self.target.lines
        for i in self.in_pieces:
            slot = int(self.program.nodes[i].attr)  # type: ignore[call-overload]
            item_bytes = self.program.tensors[slot].dtype.itemsize
            calls.append(f"q{i}, kv{i} = pc.positions(q, kv, N, QX, {item_bytes}, {lines})")
            calls.append(f"v{i} = {self.prefix}_piece{i}(args, head, b, h, q{i}, kv{i})")
        return (
            *(self._piece(i) for i in self.in_pieces),
            self._function(
                "pieces",
                "args, head, b, h, q, kv, N: tl.constexpr, QX: tl.constexpr",
                calls,
                self.in_pieces,
            ),
        )

    def _comes_in_pieces(self, i: int) -> bool:
        """Whether a load reads what is whole pieces along kv in memory, with other indices that
        are computed from positions and values of the head."""
        node = self.program.nodes[i]
        if node.op != "load" or self.levels[i] != SCORE or self._is_inside_loop(i):
            return False
        along = self._along_keys(i)
        others = [d for d in range(len(node.args)) if d != along]
        slot = int(node.attr)  # type: ignore[call-overload]
        return along is not None and all(
            letters(self.target.layouts, slot, d)[1] == "v" and self._is_row_index(node.args[d])
            for d in others
        )

    def _along_keys(self, i: int) -> int | None:
        """The dimension of a load that kv alone indexes, with neighbours side by side and whole
        pieces up to its end."""
        node = self.program.nodes[i]
        slot = int(node.attr)  # type: ignore[call-overload]
        for d, index in enumerate(node.args):
            inside, step, whole = letters(self.target.layouts, slot, d)
            if position_name(self.program, index) == "kv" and step == "1":
                return d if inside == "i" or whole == "m" else None
        return None

    def _is_inside_loop(self, i: int) -> bool:
        return bool(self.program.axes[i] & (Axes.R0 | Axes.R1 | Axes.R2 | Axes.R3))

    def _is_row_index(self, i: int) -> bool:
        return self.levels[i] in (_HEAD, ROW) and all(
            self.program.nodes[j].op not in ("load", "reduce") for j in self._above_head([i])
        )

    def _above_head(self, roots: list[int]) -> list[int]:
        """The roots and what they are computed from, but for values of the head, in order."""
        found: set[int] = set()
        stack = [i for i in roots if self.levels[i] != _HEAD]
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += [a for a in self.program.nodes[i].args if self.levels[a] != _HEAD]
        return sorted(found)

    def _piece(self, i: int) -> str:
        """The function of one load: q and kv are those of its tile, expanded."""
        node, along = self.program.nodes[i], self._along_keys(i)
        slot = int(node.attr)  # type: ignore[call-overload]
        rank, unit = self.program.tensors[slot].rank, self._unit(slot)
        base = arg_index(self.program, slot)
        whole, widen = ("whole", ".to(tl.int64)") if self.target.wide else ("whole32", "")
        others = [d for d in range(rank) if d != along]
        lines = self._unpack("head")
        for j in self._above_head([node.args[d] for d in others]):
            self._statement(j, self.program.nodes[j], lines, "")
        pointer = f"args[{base}]"
        for d in others:
            index = self._name(node.args[d])
            if letters(self.target.layouts, slot, d)[0] != "i":
                index = f"dm.clamp_index({index}, dm.{whole}(args, {base + 1 + 3 * d}))"
            stride = f"dm.{whole}(args, {base + 1 + 3 * (rank + d)})"
            # said by arithmetic that rows start at whole pieces, see triton/tiles.py
            pointer += f" + {index}{widen} * ({stride} // {unit} * {unit})"
        mask = ""
        if along is not None and letters(self.target.layouts, slot, along)[0] != "i":
            size = f"dm.{whole}(args, {base + 1 + 3 * along})"
            mask = f", mask=kv < {size} // {unit} * {unit}, other=0"
        once = Axes.B | Axes.H  # no other head reads the elements again
        if self.target.streamed and self.program.axes[i] & once == once:
            mask += ', eviction_policy="evict_first"'
        lines.append(f"return tl.load({pointer} + kv{mask})")
        return self._define(f"piece{i}", "args, head, b, h, q, kv", lines)

    def _unit(self, slot: int) -> int:
        """Elements in a piece of a captured tensor."""
        return VECTOR_BYTES // self.program.tensors[slot].dtype.itemsize

    def _load(self, i: int, node: Node, lines: list[str], indent: str) -> None:
        if i not in self.in_pieces:
            super()._load(i, node, lines, indent)
            return
        slot = int(node.attr)  # type: ignore[call-overload]
        narrow = is_narrow(self.target.layouts, slot) and not self.target.wide
        loaded = "tl.int32" if narrow else TYPES[node.dtype]
        piece = f"pieces[{self.in_pieces.index(i)}]"
        lines.append(
            f"{indent}v{i} = pc.spread({piece}, score, QX, {self.target.lines}).to({loaded})"
        )

    def body(self, inputs: str) -> str:
        """What depends on queries and keys together; q, kv and outer values come unexpanded."""
        (output,) = self.program.outputs
        result = self._name(output)
        if "score" in inputs and self.levels[output] != SCORE:
            # a score_mod that ignores the score: what it gives takes the shape of one
            result = f"tl.where(score > float('inf'), score, {result})"
        return self._define(
            "body",
            f"args, head, row, column, b, h, q, kv{inputs}, QX: tl.constexpr",
            [*self.expanded(), *self._hoisted(SCORE), f"return {result}"],
        )

    def expanded(self) -> list[str]:
        """What the outer levels computed, in the dimensions of scores."""
        lines = ["q = tl.expand_dims(q, QX)", "kv = tl.expand_dims(kv, 1 - QX)"]
        lines += self._unpack("head")
        for level, axis in (("row", "QX"), ("column", "1 - QX")):
            for line in self._unpack(level):
                name, value = line.split(" = ")
                lines.append(f"{name} = tl.expand_dims({value}, {axis})")
        return lines

    @staticmethod
    def typed(value: str, dtype: str) -> str:
        return f"bi.scalar({value}, {dtype})"


class BiasWriter(LevelWriter):
    """Writes a linear bias (score_form.py): what depends on the head, and functions of it."""

    deepest = ROW

    @staticmethod
    def level_of(axes: Axes) -> int:
        return ROW if axes & (Axes.Q | Axes.KV) else _HEAD

    def functions(self) -> tuple[str, str, str]:
        slope, bias = (self._name(i) for i in self.program.outputs)
        head = self._unpack("head")
        return (
            self._function("head", "args, b, h", self._hoisted(_HEAD), self.head),
            self._define("slope", "args, head, b, h", [*head, f"return {slope}"]),
            self._define(
                "at",
                "args, head, b, h, q, kv",
                [*head, *self._hoisted(ROW), f"return {bias}"],
            ),
        )


def emit_bias(program: Program, target: Target) -> str:
    """bias_head(args, b, h), bias_slope(args, head, b, h) and bias_at(args, head, b, h, q, kv)."""
    return gluon_module(*BiasWriter(program, "bias", target).functions())


def emit_score(program: Program, target: Target) -> str:
    """score_head, score_row, score_column, score_pieces and score_body."""
    writer = LevelWriter(program, "score", target)
    return gluon_module(*writer.outer(), *writer.pieces(), writer.body(", pieces, score"))


def comes_in_pieces(program: Program, target: Target) -> bool:
    """Whether any captured elements of single scores are loads of their own."""
    return len(LevelWriter(program, "", target).pieces()) > 1


def looks_up_lane_by_lane(program: Program, target: Target) -> bool:
    """Whether loads, or sums over captured rows, depend on query and key together and do not come
    in pieces."""
    writer = LevelWriter(program, "", target)
    writer.pieces()
    return any(
        node.op in ("load", "reduce") and writer.levels[i] == SCORE and i not in writer.in_pieces
        for i, node in enumerate(program.nodes)
    )


def gluon_module(*parts: str) -> str:
    return module_text(_IMPORTS, *parts)
