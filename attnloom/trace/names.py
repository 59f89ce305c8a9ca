"""Names of mods and of the tensors that they capture, as their author wrote them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_MAX_DEPTH = 4


NOTE = "known_as"
# What is put around a mod when a part of a mask, or of a batch, is computed.
_SHELLS = (
    "attnloom.masking.views",
    "attnloom.api.jagged",
    "attnloom.api.quantized",
    "attnloom.api.sharded",
)


def known_as(mod: Any, name: str) -> Any:
    """The mod itself, with a note of what its author calls it."""
    setattr(mod, NOTE, name)
    return mod


def author_of(mod: Any) -> Any:
    """The function that an author wrote, under partials and attnloom's own shells."""
    while isinstance(mod, functools.partial) and NOTE not in vars(mod):
        shell = getattr(mod.func, "__module__", None) in _SHELLS and mod.args
        mod = mod.args[0] if shell else mod.func
    return mod


def mod_name(mod: Any) -> str:
    """The name a user knows a mod by: of the function under partials, methods and callables."""
    mod = author_of(mod)
    name = getattr(mod, NOTE, None) or getattr(mod, "__qualname__", None)
    return str(name or type(mod).__qualname__).replace("<locals>.", "")


def name_of(mod: Any, tensor: torch.Tensor) -> str:
    """The name by which a mod captures `tensor`, or ''."""
    return next((name for name, found in named_tensors(mod) if found is tensor), "")


def tensor_names(mod: Any, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """A name for each tensor: `bias`, `self.slope`, `tables['near']`; `tensor0` where none is
    found, as for one that the mod computes itself."""
    known: dict[int, str] = {}
    for name, tensor in named_tensors(mod):
        known.setdefault(id(tensor), name)
    return tuple(known.get(id(t), f"tensor{slot}") for slot, t in enumerate(tensors))


def number_name(mod: Any, number: float) -> str:
    """The name by which a mod captures a number, or '' where none, or several, have this value."""
    names = {
        name for name, found in _inside(mod, "", 0, (int, float)) if repr(found) == repr(number)
    }
    return names.pop() if len(names) == 1 else ""


def named_tensors(mod: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a mod's closure, defaults, globals, bound object and functools.partial."""
    yield from _inside(mod, "", 0, torch.Tensor)


def _inside(value: Any, name: str, depth: int, wanted: Any) -> Iterator[tuple[str, Any]]:
    """Values of the wanted kinds, and their names."""
    if isinstance(value, wanted):
        yield name, value
        return
    if depth > _MAX_DEPTH:
        return
    for kinds, parts in _PARTS:
        if isinstance(value, kinds):
            for inner, part in parts(value, name):
                yield from _inside(part, inner, depth + 1, wanted)
            return


def _of_partial(value: functools.partial, name: str) -> Iterator[tuple[str, Any]]:
    yield name, value.func
    yield from zip(_parameters(value.func), value.args, strict=False)
    yield from value.keywords.items()


def _of_method(value: MethodType, name: str) -> Iterator[tuple[str, Any]]:
    yield "self", value.__self__
    yield name, value.__func__


def _of_module(value: torch.nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
        yield f"{name or 'self'}.{inner}", tensor
    for inner, item in vars(value).items():
        if isinstance(item, (int, float)):
            yield f"{name or 'self'}.{inner}", item


def _of_sequence(value: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    for place, item in enumerate(value):
        yield f"{name}[{place}]", item


def _of_dict(value: dict[Any, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        yield f"{name}[{key!r}]", item


def _of_object(value: object, name: str) -> Iterator[tuple[str, Any]]:
    for inner, item in getattr(value, "__dict__", {}).items():
        yield f"{name or 'self'}.{inner}", item


def _nothing(_: object, __: str) -> Iterator[tuple[str, Any]]:
    return iter(())


def _variables(function: FunctionType, _: str) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


# The first kind that fits says what a value holds: (name, part) pairs.
_PARTS: tuple[tuple[Any, Callable[[Any, str], Iterator[tuple[str, Any]]]], ...] = (
    (FunctionType, _variables),
    (functools.partial, _of_partial),
    (MethodType, _of_method),
    (torch.nn.Module, _of_module),
    ((list, tuple), _of_sequence),
    (dict, _of_dict),
    ((type, ModuleType), _nothing),
    (object, _of_object),
)
