"""Whether a mod is what another one was at an earlier call, in a microsecond.

`dependencies.py` finds what a mod depends on and makes a key of all of it. A Snapshot is a plan of
where to look, with what was found there: two mods of the same code whose cells, defaults and
globals hold equal values, and tensors of the same form, do the same. The mods may be different
closures. Numbers must be equal; tensors may be others.

Taken are mods of plain functions, methods, partials, numbers, strings, tensors, tuples, lists,
attributes of objects as far as bytecode shows which are read, and what has no state. Rejected, and
left to `dependencies.py`: dicts, NaN, methods that are read from objects, callable objects,
functions that reach themselves.
A Snapshot holds neither tensors nor mods.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from attnloom.trace.checked import unwrapped
from attnloom.trace.code_facts import Chain
from attnloom.trace.dependencies import (
    UnrecognisedError,
    attribute,
    globals_of,
    is_of_torch,
    is_stateless,
    pure_facts,
)
from attnloom.trace.forms import form_of

_BUILTINS = vars(builtins)
_MISSING = object()
_MAX_DEPTH = 8
_WHOLE: tuple[Chain, ...] = ((),)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Of one of these types an equal value does the same.
_VALUES = frozenset({int, bool, str, type(None), type(...), torch.dtype, torch.device})


class _NoPlanError(Exception):
    """The mod reaches something of a kind that is not looked at here."""


# What looking at a mod raises: an empty cell, a tensor without strides, an object that has changed.
_UNREADABLE = (ValueError, RuntimeError, UnrecognisedError)


class Snapshot:
    """What a mod depended on."""

    __slots__ = ("_aliases", "_root")

    def __init__(self, root: _Place, tensors: list[torch.Tensor]) -> None:
        self._root = root
        self._aliases = _aliases(tensors)

    def tensors(self, mod: Any) -> list[torch.Tensor] | None:
        """The tensors that `mod` captures, in the order of `take`; None if it is another mod."""
        found: list[torch.Tensor] = []
        try:
            same = self._root.holds(mod, found)
        except _UNREADABLE:
            return None
        if not same or (len(found) > 1 and self._aliases != _aliases(found)):
            return None
        return found


def take(mod: Any) -> tuple[Snapshot, list[torch.Tensor]] | None:
    """A snapshot of a mod and the tensors that it captures; None for mods of other kinds."""
    tensors: list[torch.Tensor] = []
    try:
        root = _place(mod, 0)
        if not root.holds(mod, tensors):
            return None
    except (_NoPlanError, *_UNREADABLE):
        return None
    return Snapshot(root, tensors), tensors


def _aliases(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Which of several tensors are one object."""
    if len(tensors) < 2:
        return ()
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)])


class _Place:
    """Something that a mod reaches, as it was."""

    __slots__ = ()

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        """Whether `value` is alike; its tensors are added to `found`."""
        raise NotImplementedError


class _Value(_Place):
    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.kind = value, type(value)

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        return value is self.value or (type(value) is self.kind and value == self.value)


class _Float(_Place):
    __slots__ = ("sign", "value")

    def __init__(self, value: float) -> None:
        if math.isnan(value):
            raise _NoPlanError
        self.value, self.sign = value, math.copysign(1.0, value)

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        return value is self.value or (
            type(value) is float
            and value == self.value
            and math.copysign(1.0, value) == self.sign  # 0.0 == -0.0
        )


class _Same(_Place):
    """A module, a builtin, a class or a mask_mod of attnloom's own: itself and no other."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        return value is self.value


class _Tensor(_Place):
    """A tensor of this form: everything but its address and what it holds."""

    __slots__ = ("kind", "names", "same")

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested:
            raise _NoPlanError
        self.kind, self.same = type(tensor), form_of([tensor])
        self.names = [*vars(tensor)]  # which code does not read: dependencies.py

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        # torch's guards end the process for nested tensors, which have no sizes
        if type(value) is not self.kind or value.is_nested or not self.same(value):
            return False
        if [*vars(value)] != self.names:
            return False
        found.append(value)
        return True


class _Items(_Place):
    """A tuple or a list."""

    __slots__ = ("kind", "places")

    def __init__(self, value: Any, depth: int) -> None:
        self.kind, self.places = type(value), tuple(_place(v, depth + 1) for v in value)

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        if type(value) is not self.kind or len(value) != len(self.places):
            return False
        for place, item in zip(self.places, value, strict=True):  # noqa: SIM110 - twice as fast
            if not place.holds(item, found):
                return False
        return True


class _Function(_Place):
    """A function of this code whose cells, defaults and globals are alike."""

    __slots__ = ("attributes", "cells", "code", "defaults", "names")

    def __init__(self, function: FunctionType, depth: int) -> None:
        if function.__kwdefaults__:
            raise _NoPlanError
        self.code: CodeType = function.__code__
        self.attributes = dict(function.__dict__)
        facts = pure_facts(self.code)
        self.cells = tuple(
            _place(cell.cell_contents, depth + 1, facts.chains.get(name, _WHOLE))
            for name, cell in zip(self.code.co_freevars, function.__closure__ or (), strict=True)
        )
        defaults = function.__defaults__
        self.defaults = None if defaults is None else _Items(defaults, depth)
        self.names = tuple(
            (name, _place(value, depth + 1, facts.chains.get(name, _WHOLE)))
            for name, value in globals_of(function, facts)
        )

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        if type(value) is not FunctionType or value.__code__ is not self.code:
            return False
        if value.__dict__ != self.attributes or value.__kwdefaults__:
            return False
        if self.defaults is None:
            if value.__defaults__ is not None:
                return False
        elif not self.defaults.holds(value.__defaults__, found):
            return False
        if self.cells:
            cells: Any = value.__closure__  # as many as the code has
            for place, cell in zip(self.cells, cells):  # noqa: B905 - strict takes 0.1 us
                if not place.holds(cell.cell_contents, found):
                    return False
        if self.names:
            space = value.__globals__
            for name, place in self.names:
                at_hand = space.get(name, _MISSING)
                if at_hand is _MISSING:
                    at_hand = _BUILTINS.get(name, _MISSING)
                if not place.holds(at_hand, found):
                    return False
        return True


class _Method(_Place):
    """A bound method: its function, and what that reads of its object."""

    __slots__ = ("function", "owner")

    def __init__(self, method: MethodType, depth: int) -> None:
        function = method.__func__
        if type(function) is not FunctionType or not function.__code__.co_argcount:
            raise _NoPlanError
        self.function = _place(function, depth + 1)
        first = function.__code__.co_varnames[0]
        chains = pure_facts(function.__code__).chains.get(first, ())
        self.owner = _Object(method.__self__, depth, chains)

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        return (
            type(value) is MethodType
            and self.function.holds(value.__func__, found)
            and self.owner.holds(value.__self__, found)
        )


class _Partial(_Place):
    __slots__ = ("args", "attributes", "function", "named")

    def __init__(self, partial: functools.partial[Any], depth: int) -> None:
        self.function = _place(partial.func, depth + 1)
        self.args = _Items(partial.args, depth)
        self.named = tuple((k, _place(v, depth + 1)) for k, v in partial.keywords.items())
        self.attributes = dict(partial.__dict__)

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        if type(value) is not functools.partial or value.__dict__ != self.attributes:
            return False
        named = value.keywords
        return (
            self.function.holds(value.func, found)
            and self.args.holds(value.args, found)
            and len(named) == len(self.named)
            and all(place.holds(named.get(name, _MISSING), found) for name, place in self.named)
        )


class _Object(_Place):
    """Attributes of an object, by the chains that code reads of it."""

    __slots__ = ("kind", "places")

    def __init__(self, owner: Any, depth: int, chains: tuple[Chain, ...]) -> None:
        self.kind = type(owner)
        rest: dict[str, list[Chain]] = {}
        for chain in chains:
            if not chain:  # the object as a whole
                raise _NoPlanError
            rest.setdefault(chain[0], []).append(chain[1:])
        self.places = tuple(
            (name, _place(attribute(owner, name, None), depth + 1, tuple(found)))
            for name, found in rest.items()
        )

    def holds(self, value: Any, found: list[torch.Tensor]) -> bool:
        if type(value) is not self.kind:
            return False
        for name, place in self.places:  # noqa: SIM110 - twice as fast
            if not place.holds(attribute(value, name, None), found):
                return False
        return True


def _place(value: Any, depth: int, chains: tuple[Chain, ...] = _WHOLE) -> _Place:
    """chains: what is read of a value that is an object; see code_facts.py."""
    if depth > _MAX_DEPTH:
        raise _NoPlanError
    kind = type(value)
    if kind in _VALUES:
        return _Value(value)
    make = _PLACES.get(kind)
    if make is not None:
        return make(value, depth)
    if is_stateless(value, kind):
        return _Same(value)
    return _Object(value, depth, chains)


def _function(function: FunctionType, depth: int) -> _Place:
    itself = is_of_torch(function) or unwrapped(function) is not function
    return _Same(function) if itself else _Function(function, depth)


_PLACES: dict[type, Callable[[Any, int], _Place]] = {
    **{kind: lambda value, _: _Tensor(value) for kind in _TENSORS},
    float: lambda value, _: _Float(value),
    FunctionType: _function,
    MethodType: _Method,
    functools.partial: _Partial,
    tuple: _Items,
    list: _Items,
}
