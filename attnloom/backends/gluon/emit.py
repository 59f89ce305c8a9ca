"""Turn programs into the jit functions that Gluon kernels call. The contract: fragments.py.

The text is that of the Triton fragments (backends/triton/emit.py): Triton's elementwise functions
compile in Gluon kernels as they are, and take the layouts of their operands. What differs is where
values live. A tensor has a layout here, and a value of shape [M, 1] has a copy of itself for each
column that its thread holds: loads would be repeated that often. So values by row and by column are
computed in one dimension, where a thread holds each once, and expanded where scores are.
"""

from __future__ import annotations

from attnloom.backends.triton.emit import Target, Writer, module_text
from attnloom.ir.node import Axes, Program

_BUILTINS = "from attnloom.backends.gluon import builtins as bi\n"
_HEAD, _ROW, _COLUMN, _SCORE = range(4)


class LevelWriter(Writer):
    """Writes head, row, column and body of a program, each with values of its own level."""

    deepest = _SCORE

    def __init__(self, program: Program, prefix: str, target: Target) -> None:
        super().__init__(program, prefix, target)
        self.column = [i for i in self.across if self.levels[i] == _COLUMN]

    @staticmethod
    def level_of(axes: Axes) -> int:
        """0: head, 1: row, 2: column, 3: score."""
        return (_COLUMN if axes & Axes.KV else _HEAD) + (_ROW if axes & Axes.Q else _HEAD)

    def outer(self) -> tuple[str, str, str]:
        """head, row and column."""
        head = self._unpack("head")
        return (
            self._function("head", "args, b, h", self._hoisted(_HEAD), self.head),
            self._function("row", "args, head, b, h, q", head + self._hoisted(_ROW), self.row),
            self._function(
                "column", "args, head, b, h, kv", head + self._hoisted(_COLUMN), self.column
            ),
        )

    def body(self, inputs: str) -> str:
        """What depends on queries and keys together; q, kv and outer values come unexpanded."""
        (output,) = self.program.outputs
        result = self._name(output)
        if "score" in inputs and self.levels[output] != _SCORE:
            # a score_mod that ignores the score: what it gives takes the shape of one
            result = f"tl.where(score > float('inf'), score, {result})"
        return self._define(
            "body",
            f"args, head, row, column, b, h, q, kv{inputs}, QX: tl.constexpr",
            [*self.expanded(), *self._hoisted(_SCORE), f"return {result}"],
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

    deepest = _ROW

    @staticmethod
    def level_of(axes: Axes) -> int:
        return _ROW if axes & (Axes.Q | Axes.KV) else _HEAD

    def functions(self) -> tuple[str, str, str]:
        slope, bias = (self._name(i) for i in self.program.outputs)
        head = self._unpack("head")
        return (
            self._function("head", "args, b, h", self._hoisted(_HEAD), self.head),
            self._define("slope", "args, head, b, h", [*head, f"return {slope}"]),
            self._define(
                "at",
                "args, head, b, h, q, kv",
                [*head, *self._hoisted(_ROW), f"return {bias}"],
            ),
        )


def emit_bias(program: Program, target: Target) -> str:
    """bias_head(args, b, h), bias_slope(args, head, b, h) and bias_at(args, head, b, h, q, kv)."""
    return gluon_module(*BiasWriter(program, "bias", target).functions())


def emit_score(program: Program, target: Target) -> str:
    """score_head, score_row, score_column and score_body."""
    writer = LevelWriter(program, "score", target)
    return gluon_module(*writer.outer(), writer.body(", score"))


def emit_mask(program: Program, target: Target) -> str:
    """mask_head, mask_row, mask_column and mask_body."""
    writer = LevelWriter(program, "mask", target)
    return gluon_module(*writer.outer(), writer.body(""))


def column_values(program: Program) -> list[int]:
    """The nodes whose values `column` of a program's fragment gives, in order."""
    return LevelWriter(program, "", Target()).column


def gluon_module(*parts: str) -> str:
    return module_text(_BUILTINS, *parts)
