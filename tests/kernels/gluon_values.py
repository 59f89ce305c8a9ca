"""Numbers, vectors and addresses of a kernel that gluon_world.py runs as Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Int(int):
    """A scalar of a kernel."""

    def to(self, _: Any) -> Int:
        return self


def _operator(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Int, other: Any) -> Any:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Int(found)

    return method


for _name in "add sub mul floordiv mod and or xor lshift rshift".split():
    for _kind in (f"__{_name}__", f"__r{_name}__"):
        setattr(Int, _kind, _operator(_kind))
for _name in "lt le gt ge eq ne".split():
    setattr(Int, f"__{_name}__", _operator(f"__{_name}__"))
Int.__hash__ = int.__hash__  # type: ignore[method-assign]


class Vec(list[Any]):
    """A vector of positions."""

    def __add__(self, other: Any) -> Vec:  # type: ignore[override]
        return other if isinstance(other, Nothing) else Vec(Int(x + other) for x in self)

    __radd__ = __iadd__ = __add__  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Any:
        return Vec(Int(x == other) for x in self) if isinstance(other, int) else [*self] == other

    def to(self, _: Any) -> Vec:
        return self


class Nothing:
    """Scores, weights and results."""

    def to(self, _: Any) -> Nothing:
        return self

    def __getitem__(self, _: Any) -> Nothing:
        return self

    def __mul__(self, _: Any) -> Nothing:
        return self

    __sub__ = __add__ = __mul__

    def __neg__(self) -> Nothing:
        return self


@dataclass
class Pointer:
    memory: list[int]
    offset: int = 0

    def __add__(self, steps: int) -> Pointer:
        return Pointer(self.memory, self.offset + steps)
