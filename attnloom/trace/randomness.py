"""Random numbers of Python and numpy in a mod. torch's are seen by the tracer, as torch functions.

A mod that draws would have one number frozen into its program, or another one at every trace. Where
a mod, or a function that it reaches, names a generator, the generator's state is compared before
and after the mod runs. Found are `random` and `numpy.random`, also where they are imported in the
mod, functions bound to their hidden generators, and generators in variables and attributes. Not
found: generators that the mod makes for itself, and the operating system's entropy.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from attnloom.trace.symbols import NumberProxy

_MAX_DEPTH = 6
_MAX_ITEMS = 64  # of a container
# Hold no generator; a NumberProxy would also take a look at it for a look at its number.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.Tensor, NumberProxy})
_LIBRARIES = ("torch", "numpy", "math", "operator", "builtins")


@dataclass(frozen=True, slots=True)
class Source:
    """A generator of random numbers. name: what a message calls it. state: reads its state."""

    name: str
    state: Callable[[], object]


def sources(mod: Any) -> tuple[Source, ...]:
    """Every generator that a mod names, as far as can be seen."""
    found: dict[int, Source] = {}
    seen: set[tuple[int, frozenset[str]]] = set()
    pending: list[tuple[str, Any, frozenset[str], int]] = [("", mod, _names_of_call(mod), 0)]
    while pending:
        name, value, names, depth = pending.pop()
        if type(value) in _PLAIN:
            continue
        source = _source(name, value)
        if source is not None:
            found[id(getattr(value, "__self__", value))] = source
            continue
        if depth > _MAX_DEPTH or (id(value), names) in seen:
            continue
        seen.add((id(value), names))
        pending += [(*part, depth + 1) for part in _parts(value, names)]
    return tuple(found.values())


def _parts(value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """What code that reads `names` reaches through a value: (name, part, names read there)."""
    kind = type(value)
    if kind is FunctionType:
        yield from _of_function(value)
    elif kind is MethodType:
        inner = _names(getattr(value.__func__, "__code__", None))
        yield "self", value.__self__, inner
        yield "", value.__func__, inner
    elif kind is functools.partial:
        inner = _names_of_call(value.func)
        for part in (value.func, *value.args, *value.keywords.values()):
            yield "", part, inner
    elif kind in (list, tuple, dict):
        items = value.values() if kind is dict else value
        for item in list(items)[:_MAX_ITEMS]:
            yield "", item, names
    elif kind is ModuleType and value.__name__.split(".")[0] in _LIBRARIES:
        return
    else:
        own = getattr(value, "__dict__", {})
        for name in names:
            if name in own:
                yield name, own[name], names
        for name in (*names, "__call__"):  # methods that the mod calls
            method = getattr(kind, name, None)
            if type(method) is FunctionType:
                yield "", MethodType(method, value), names


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, frozenset[str]]]:
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return
    names = _names(function.__code__)
    if any("random" in name.split(".") for name in names):
        yield "random", random.random, names
        if "numpy.random" in sys.modules or "numpy" in sys.modules:
            import numpy as np

            yield "numpy.random", np.random.rand, names
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents, names
        except ValueError:  # not assigned yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", value, names
    space = function.__globals__
    for name in names:
        if name in space:
            yield name, space[name], names


def _names_of_call(mod: Any) -> frozenset[str]:
    own = getattr(type(mod), "__call__", None)  # noqa: B004 - its code, not whether it is there
    return _names(getattr(mod, "__code__", None) or getattr(own, "__code__", None))


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType | None) -> frozenset[str]:
    """Globals, attributes and modules that code names, nested functions included."""
    if code is None:
        return frozenset()
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


def _source(name: str, value: Any) -> Source | None:
    """The generator that a value is, or whose method it is."""
    owner = value
    if not isinstance(value, random.Random):
        owner = getattr(value, "__self__", value)
        if isinstance(value, MethodType | BuiltinFunctionType) or owner is not value:
            name = name or getattr(value, "__name__", "")
    if type(owner) is random.Random:
        hidden = owner is getattr(random.random, "__self__", None)
        return Source(_called("random", name, hidden, "random.Random"), owner.getstate)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(owner, numpy_random.RandomState):
        hidden = owner is getattr(numpy_random.rand, "__self__", None)
        return Source(
            _called("numpy.random", name, hidden, "numpy.random.RandomState"),
            lambda: pickle.dumps(owner.get_state(legacy=False)),
        )
    if isinstance(owner, numpy_random.Generator):
        return Source(
            _called("", name, False, "numpy.random.Generator"),
            lambda: pickle.dumps(owner.bit_generator.state),
        )
    return None


def _called(module: str, name: str, hidden: bool, kind: str) -> str:
    if hidden:
        return f"the module {module}"
    return f"{name!r}, a {kind}" if name else f"a {kind}"
