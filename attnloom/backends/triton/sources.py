"""Where the text of a jit function ends, found by how its lines begin.

Triton asks `inspect`, which takes a function apart into tokens to see where it ends: 0.4 ms for
each of some 200 functions, more than half of what importing kernels took. Theirs are top-level
functions of modules of ours, so that the next line that begins in the first column is no longer
part of them; a test compares both ways for every one. Other functions are left to `inspect`.
"""

from __future__ import annotations

import inspect
import linecache
from types import FunctionType
from typing import Any

from triton.runtime import jit

OURS = ("attnloom.", "attnloom_fragment_")
# a body, an empty line, the end of a signature of several lines, a comment
_INSIDE = (" ", "\n", ")", "#")


def install() -> None:
    """Have Triton find functions of ours so, where it asks the module `inspect`."""
    if getattr(jit, "inspect", None) is inspect:
        jit.inspect = _Inspect()


class _Inspect:
    """The module `inspect`, as Triton sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def getsourcelines(function: Any) -> tuple[list[str], int]:
        return lines_of(function) or inspect.getsourcelines(function)


def lines_of(function: Any) -> tuple[list[str], int] | None:
    """What `inspect.getsourcelines` says of a top-level function of ours; None for any other."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    if not function.__module__.startswith(OURS) or "." in function.__qualname__:
        return None
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    start = code.co_firstlineno - 1
    head = f"def {code.co_name}("
    begin = next((i for i in range(start, len(lines)) if lines[i].startswith(head)), None)
    if begin is None:
        return None
    end = begin + 1
    while end < len(lines) and lines[end].startswith(_INSIDE):
        end += 1
    while lines[end - 1].startswith(("\n", "#")):
        end -= 1
    return lines[start:end], start + 1
