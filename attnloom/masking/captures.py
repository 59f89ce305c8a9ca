"""The tensors that a mod captures: found, replaced, and compared by structure.

Reached are closure cells, default arguments, functools.partial, bound methods, callable objects
and dataclasses (their attributes), nested functions, tuples, lists and dicts of all these.
Not reached are nn.Modules, whose owner moves them, and attributes of other objects.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor was taken out of a mod."""

    index: int


def map_captures(
    mod: Any, kind: type, visit: Callable[[Any], Any], *, with_globals: bool = False
) -> Any:
    """The mod with `visit` applied once to every captured object of type `kind`.

    What does not change is shared with the original, and a mod without such captures is returned
    itself. with_globals: also objects the code names as globals; the rebuilt function then no
    longer sees later assignments to its module.
    """
    return _Mapper(kind, visit, with_globals).map(mod)


def captured_tensors(mod: Any) -> list[torch.Tensor]:
    """Captured tensors, globals included, each once, in the order met."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_captures(mod, torch.Tensor, note, with_globals=True)
    return found


def take_tensors(mod: Any) -> tuple[list[torch.Tensor], Any]:
    """Captured tensors (no globals) and the mod with a Hole where each one was."""
    tensors: list[torch.Tensor] = []

    def dig(tensor: torch.Tensor) -> Hole:
        tensors.append(tensor)
        return Hole(len(tensors) - 1)

    return tensors, map_captures(mod, torch.Tensor, dig)


def fill_holes(mod: Any, leaves: list[Any]) -> Any:
    """The inverse of `take_tensors`."""
    return map_captures(mod, Hole, lambda hole: leaves[hole.index])


def structure_key(value: Any) -> Any:
    """Hashable; equal for mods with the same code and equal captures apart from Holes.

    Unhashable captured objects count as equal only to themselves.
    """
    return _structure_key(value, frozenset())


def referenced_globals(code: types.CodeType) -> set[str]:
    """Names that the code, or code nested in it, may look up as globals."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= referenced_globals(const)
    return names


class _Mapper:
    def __init__(self, kind: type, visit: Callable[[Any], Any], with_globals: bool) -> None:
        self.kind = kind
        self.visit = visit
        self.with_globals = with_globals
        self.done: dict[int, Any] = {}
        self.keep_alive: list[Any] = []

    def map(self, value: Any) -> Any:
        if id(value) in self.done:
            return self.done[id(value)]
        if isinstance(value, self.kind):
            self.keep_alive.append(value)
            self.done[id(value)] = out = self.visit(value)
            return out
        rebuild = _rebuilder(value)
        if rebuild is None:
            return value
        # A function that captures itself keeps the original of itself.
        self.done[id(value)] = value
        self.keep_alive.append(value)
        self.done[id(value)] = out = rebuild(self, value)
        return out

    def many(self, values: Any) -> tuple[list[Any], bool]:
        out = [self.map(v) for v in values]
        return out, any(a is not b for a, b in zip(out, values, strict=True))


def _rebuilder(value: Any) -> Callable[[_Mapper, Any], Any] | None:
    for kinds, rebuild in _REBUILDERS:
        if isinstance(value, kinds):
            return rebuild
    if isinstance(value, (torch.nn.Module, type, types.BuiltinFunctionType, types.ModuleType)):
        return None
    is_record = dataclasses.is_dataclass(value) or callable(value)
    return _map_object if is_record and hasattr(value, "__dict__") else None


def _map_function(mapper: _Mapper, fn: types.FunctionType) -> types.FunctionType:
    cells = fn.__closure__ or ()
    filled = [cell for cell in cells if is_filled(cell)]
    contents, closure_changed = mapper.many([cell.cell_contents for cell in filled])
    defaults, defaults_changed = mapper.many(fn.__defaults__ or ())
    named = fn.__kwdefaults__ or {}
    named_values, named_changed = mapper.many(list(named.values()))
    patched = _mapped_globals(mapper, fn) if mapper.with_globals else {}
    if not (closure_changed or defaults_changed or named_changed or patched):
        return fn
    fresh = {id(cell): types.CellType(value) for cell, value in zip(filled, contents, strict=True)}
    out = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **patched} if patched else fn.__globals__,
        fn.__name__,
        tuple(defaults) or None,
        tuple(fresh.get(id(cell), cell) for cell in cells),
    )
    out.__kwdefaults__ = dict(zip(named, named_values, strict=True)) or None
    out.__qualname__, out.__doc__ = fn.__qualname__, fn.__doc__
    out.__module__ = fn.__module__
    out.__dict__.update(fn.__dict__)
    return out


def _mapped_globals(mapper: _Mapper, fn: types.FunctionType) -> dict[str, Any]:
    """Globals the code names that change: of the wanted kind, or functions that reach one."""
    patched = {}
    for name in sorted(referenced_globals(fn.__code__) & fn.__globals__.keys()):
        value = fn.__globals__[name]
        if isinstance(value, (mapper.kind, types.FunctionType, functools.partial)):
            out = mapper.map(value)
            if out is not value:
                patched[name] = out
    return patched


def is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _map_partial(mapper: _Mapper, value: functools.partial) -> functools.partial:
    parts, changed = mapper.many([value.func, *value.args, *value.keywords.values()])
    if not changed:
        return value
    num_args = len(value.args)
    keywords = dict(zip(value.keywords, parts[1 + num_args :], strict=True))
    out = functools.partial(parts[0], *parts[1 : 1 + num_args], **keywords)
    out.__dict__.update(value.__dict__)
    return out


def _map_method(mapper: _Mapper, value: types.MethodType) -> types.MethodType:
    owner = mapper.map(value.__self__)
    return value if owner is value.__self__ else types.MethodType(value.__func__, owner)


def _map_tuple(mapper: _Mapper, value: tuple) -> tuple:
    out, changed = mapper.many(value)
    if not changed:
        return value
    return type(value)(*out) if hasattr(value, "_fields") else tuple(out)


def _map_list(mapper: _Mapper, value: list) -> list:
    out, changed = mapper.many(value)
    return out if changed else value


def _map_dict(mapper: _Mapper, value: dict) -> dict:
    out, changed = mapper.many(list(value.values()))
    return dict(zip(value, out, strict=True)) if changed else value


def _map_object(mapper: _Mapper, value: Any) -> Any:
    """A shallow copy with its attributes mapped; bound `self` of a nn.Module stays."""
    attributes, changed = mapper.many(list(vars(value).values()))
    if not changed:
        return value
    out = copy.copy(value)
    for name, attribute in zip(vars(value), attributes, strict=True):
        object.__setattr__(out, name, attribute)
    return out


_REBUILDERS: tuple[tuple[type, Callable[[_Mapper, Any], Any]], ...] = (
    (types.FunctionType, _map_function),
    (functools.partial, _map_partial),
    (types.MethodType, _map_method),
    (tuple, _map_tuple),
    (list, _map_list),
    (dict, _map_dict),
)


def _structure_key(value: Any, seen: frozenset[int]) -> Any:
    if id(value) in seen:
        return "cycle"
    seen = seen | {id(value)}
    parts: tuple[Any, ...]
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if is_filled(c)]
        named = value.__kwdefaults__ or {}
        head: Any = (value.__code__, id(value.__globals__), tuple(named))
        parts = (*cells, *(value.__defaults__ or ()), *named.values())
    elif isinstance(value, functools.partial):
        head = tuple(value.keywords)
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        head, parts = value.__func__, (value.__self__,)
    elif isinstance(value, (tuple, list)):
        head, parts = None, tuple(value)
    elif isinstance(value, dict):
        head, parts = tuple(value), tuple(value.values())
    else:
        try:
            hash(value)
        except TypeError:
            return (type(value), id(value))
        return (type(value), value)
    return (type(value), head, tuple(_structure_key(p, seen) for p in parts))
