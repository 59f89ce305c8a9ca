"""Random mods as Python source, drawn by hypothesis so that they shrink to readable ones."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.grammar import (
    CAPTURES,
    FORKS,
    LEAVES,
    NUMBERS,
    RESULTS,
    SCORE_LEAVES,
    TEMPLATES,
    WILD,
    Template,
)
from tests.harness.draw import Draw, Sizes
from tests.harness.table import Captures, ModPair

_WORD = re.compile(r"[A-Za-z_]\w*")
_MAX_FORKS = 3  # a mod of n forks runs 2^n times
_ARGUMENTS = {"score": "score, b, h, q_idx, kv_idx", "mask": "b, h, q_idx, kv_idx"}
Lines = tuple[str, ...]


@dataclass(frozen=True)
class FuzzProgram:
    """A random pair of mods.

    score, mask: the lines of each function's body; None where there is none.
    """

    score: Lines | None = None
    mask: Lines | None = None

    @property
    def words(self) -> frozenset[str]:
        return _words(self.score) | _words(self.mask)

    @property
    def captured(self) -> tuple[str, ...]:
        return tuple(name for name in CAPTURES if name in self.words)

    @property
    def learnable(self) -> tuple[str, ...]:
        """Captures of the score_mod whose gradient is checked."""
        used = _words(self.score)
        return tuple(n for n, c in CAPTURES.items() if c.learnable and n in used)

    @property
    def mask_axes(self) -> str:
        return "".join(axis for axis in "bh" if axis in _words(self.mask))

    @property
    def source(self) -> str:
        """Python text of a function `make(captures and numbers) -> (score_mod, mask_mod)`."""
        numbers = [name for name in NUMBERS if name in self.words]
        lines = [f"def make({', '.join([*self.captured, *numbers])}):"]
        results = []
        for kind, body in (("score", self.score), ("mask", self.mask)):
            results.append("None" if body is None else f"{kind}_mod")
            if body is not None:
                lines.append(f"    def {kind}_mod({_ARGUMENTS[kind]}):")
                lines += [f"        {line}" for line in body]
        lines.append(f"    return {', '.join(results)}")
        return "\n".join(lines)

    def draw(self, sizes: Sizes, draw: Draw) -> Captures:
        return {name: CAPTURES[name].draw(sizes, draw) for name in self.captured}

    def build(self, captures: Captures, binding: int = 0) -> ModPair:
        """The mods over these captures; `binding` chooses the values of numbers."""
        numbers = {name: value[binding] for name, value in NUMBERS.items() if name in self.words}
        return _maker(self.source)(**captures, **numbers)

    def __repr__(self) -> str:
        return f"\n{self.source}\n"


def _words(body: Lines | None) -> frozenset[str]:
    return frozenset(_WORD.findall("\n".join(body or ())))


@functools.lru_cache(maxsize=64)
def _maker(source: str) -> Callable[..., ModPair]:
    """`make`, compiled once: mods of several bindings share their code, as a user's do."""
    name = f"<fuzz {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, name, "exec"), scope)
    return scope["make"]


@dataclass
class _Writer:
    """Draws the expressions of one function. names: local variables so far, by type."""

    draw: st.DrawFn
    is_score: bool
    names: dict[str, list[str]] = field(default_factory=lambda: {"F": [], "I": [], "B": []})
    forks: int = 0

    def expression(self, kind: str, depth: int) -> str:
        # Leaves come first, so that programs shrink towards them.
        if depth == 0 or self.draw(st.integers(0, 3)) == 0:
            return self.draw(st.sampled_from(self.leaves(kind)))
        text, operands = self.draw(st.sampled_from(self.templates(kind)))
        if (text, operands) in FORKS[kind]:
            self.forks += 1
        return text.format(*(self.expression(o, depth - 1) for o in operands))

    def leaves(self, kind: str) -> list[str]:
        scores = SCORE_LEAVES if kind == "F" and self.is_score else ()
        return [*scores, *self.names[kind], *LEAVES[kind]]

    def templates(self, kind: str) -> list[Template]:
        found = list(TEMPLATES[kind])
        if self.forks < _MAX_FORKS:
            found += FORKS[kind]
        if kind == "B" and not self.is_score:
            found += WILD
        return found

    def statement(self) -> list[str]:
        """One that gives a new local variable a value."""
        kind = self.draw(st.sampled_from("FIB"))
        name = f"{kind.lower()}{sum(map(len, self.names.values()))}"
        if self.forks < _MAX_FORKS and self.draw(st.integers(0, 3)) == 3:
            self.forks += 1
            condition = self.expression("B", 1)
            arms = [self.expression(kind, 2) for _ in range(2)]
            lines = [f"if {condition}:", f"    {name} = {arms[0]}"]
            lines += ["else:", f"    {name} = {arms[1]}"]
        else:
            lines = [f"{name} = {self.expression(kind, 2)}"]
        self.names[kind].append(name)
        return lines


@st.composite
def bodies(draw: st.DrawFn, is_score: bool) -> Lines:
    """Lines of a function; scores stay of moderate size, so that softmax is no mere maximum."""
    writer = _Writer(draw, is_score)
    lines: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        lines += writer.statement()
    result = writer.expression("F" if is_score else "B", 3)
    if is_score:
        form = draw(st.sampled_from(RESULTS))
        hidden = writer.expression("B", 1) if "{1}" in form else ""
        result = form.format(result, hidden)
    return (*lines, f"return {result}")


def programs() -> st.SearchStrategy[FuzzProgram]:
    """Score mods, mask mods, and both."""
    scores, masks = bodies(True), bodies(False)
    return st.one_of(
        st.builds(FuzzProgram, scores, st.none()),
        st.builds(FuzzProgram, st.none(), masks),
        st.builds(FuzzProgram, scores, masks),
    )


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Shapes: one, odd, more keys than queries and fewer, grouped heads, odd head dimensions."""
    length = st.sampled_from((1, 2, 7, 16, 31, 40, 70))
    width = st.sampled_from((1, 3, 8, 16, 17))
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Sizes(
        B=draw(st.integers(1, 2)),
        Hq=heads * group,
        Hkv=heads,
        Q_LEN=draw(length),
        KV_LEN=draw(length),
        D=draw(width),
        Dv=draw(width),
    )
