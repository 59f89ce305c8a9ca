"""What a mod depends on, looked at on every call: code, captured tensors, numbers, constants.

Followed are Python functions (closure cells, defaults, the globals that they read), again such
functions and methods that they reach, functools.partial, lists, tuples and dicts, and attributes of
objects and torch modules as far as bytecode shows which ones are read (`self.bias`,
`self.config.window`). Stateless are torch, math, operator and plain builtins. Anything else (an
object used as a whole, properties, iterators, other modules' functions written in C) may change
unseen: such a mod has no Dependencies.
"""

from __future__ import annotations

import builtins
import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from attnloom.trace.checked import unwrapped
from attnloom.trace.code_facts import Chain, CodeFacts, code_facts
from attnloom.trace.names import NOTE
from attnloom.trace.symbols import NumberProxy

_MAX_ENTRIES = 512
_MAX_CODES = 4096
_MAX_LENGTH = 64  # of a container
# Attributes of a mod that are notes about it (see masking/extent.py).
_UNREAD = {"_attnloom_extent", NOTE}
_WHOLE: tuple[Chain, ...] = ((),)
_TORCH_FOLDER = torch.__path__[0]
_BUILTINS = vars(builtins)
_PURE_BUILTINS = frozenset(
    _BUILTINS[name]
    for name in (
        "abs all any bool divmod enumerate float int isinstance len list map max min pow print "
        "range repr reversed round slice sorted str sum tuple zip type filter Exception "
        "AssertionError ValueError RuntimeError TypeError"
    ).split()
)
_MISSING = object()


class UnrecognisedError(Exception):
    """The mod depends on something whose state cannot be compared."""


@dataclass(slots=True)
class Dependencies:
    """What a mod depends on, in a fixed order of visit.

    key: everything but the values of `numbers` and the identity of tensors.
    numbers: those that `with_numbers` can replace; numbers in objects are part of the key.
    functions: order of first visit, by identity and `rigid`; a function is visited once.
    read: names that code may read of objects. carried: attributes that its tensors have.
    rigid: an object is being visited.
    """

    key: list[Any] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    functions: dict[tuple[int, bool], int] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    rigid: bool = False

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(t.shape) for t in self.tensors)


_codes: OrderedDict[int, CodeFacts] = OrderedDict()
_lock = threading.Lock()


def dependencies(mod: Any) -> Dependencies | None:
    """What `mod` depends on now, or None if it may depend on more than can be seen."""
    found = Dependencies()
    try:
        if type(mod) in _VISITORS:
            _visit(mod, found)
        else:
            _visit_callable(mod, found)
    except (UnrecognisedError, RecursionError):
        return None
    if not found.carried.isdisjoint(found.read):
        return None  # what code reads of a tensor beyond torch's own attributes is not looked at
    tensors = found.tensors
    if len(tensors) > 1:  # which of them are one object
        first: dict[int, int] = {}
        found.key.append(tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)]))
    return found


def _visit(value: Any, found: Dependencies, chains: tuple[Chain, ...] = _WHOLE) -> None:
    """Record `value`, of which `chains` are read."""
    kind = type(value)
    visitor = _VISITORS.get(kind)
    if visitor is not None:
        visitor(value, found)
    elif is_stateless(value, kind):
        found.key.append(value)
    else:
        _visit_object(value, found, chains)


def _visit_float(value: float, found: Dependencies) -> None:
    if found.rigid:
        found.key.append((float, repr(value)))
        return
    found.numbers.append(value)
    # 0.0 == -0.0, but they are different numbers.
    found.key.append(float if value else math.copysign(1.0, value))


def _visit_int(value: int, found: Dependencies) -> None:
    if found.rigid:
        found.key.append((int, value))
        return
    found.numbers.append(value)
    found.key.append(int)


def _visit_plain(value: Any, found: Dependencies) -> None:
    found.key.append((type(value), value))


def _visit_tensor(tensor: torch.Tensor, found: Dependencies) -> None:
    found.tensors.append(tensor)
    found.carried.update(vars(tensor))
    found.key.append(
        (
            type(tensor),
            tensor.dtype,
            tensor.ndim,
            tensor.requires_grad,
            tensor.device,
            tensor.layout,
            tensor.is_neg(),
        )
    )


def _visit_sequence(value: list[Any] | tuple[Any, ...], found: Dependencies) -> None:
    found.key.append((type(value), _checked_length(value, found)))
    for item in value:
        _visit(item, found)


def _visit_dict(value: dict[Any, Any], found: Dependencies) -> None:
    _checked_length(value, found)
    if any(type(k) is not str and type(k) is not int for k in value):
        raise UnrecognisedError
    found.key.append((dict, tuple(value), tuple(type(k) for k in value)))
    for item in value.values():
        _visit(item, found)


def _checked_length(value: Any, found: Dependencies) -> int:
    if len(value) > _MAX_LENGTH or len(found.key) > _MAX_ENTRIES:
        raise UnrecognisedError
    return len(value)


def _visit_partial(partial: functools.partial[Any], found: Dependencies) -> None:
    if partial.__dict__.keys() - _UNREAD:
        raise UnrecognisedError
    found.key.append(("partial", len(partial.args), tuple(partial.keywords)))
    for value in (partial.func, *partial.args, *partial.keywords.values()):
        _visit(value, found)


def is_stateless(value: Any, kind: type) -> bool:
    """Whether it does the same at all times: a module, a builtin, a class."""
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] in ("torch", "math", "operator")
    if kind is BuiltinFunctionType:
        owner = getattr(value, "__module__", None)
        if owner is None:  # a method: of an object it does as the object is
            return value.__self__ is None or isinstance(value.__self__, type | ModuleType)
        return owner.split(".")[0] in ("torch", "math", "_operator") or value in _PURE_BUILTINS
    return value is torch.Tensor or (kind is type and value in _PURE_BUILTINS)


def _visit_function(function: FunctionType, found: Dependencies) -> None:
    function = unwrapped(function)
    if function.__dict__.keys() - _UNREAD or len(found.key) > _MAX_ENTRIES:
        raise UnrecognisedError
    place = found.functions.setdefault((id(function), found.rigid), len(found.functions))
    if place != len(found.functions) - 1:
        found.key.append(place)
        return
    code = function.__code__
    if is_of_torch(function):
        found.key.append(function)
        return
    facts = pure_facts(code)
    found.key.append(facts)
    found.read |= facts.attribute_names
    chains = facts.chains
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        _visit(_contents(cell), found, chains.get(name, _WHOLE))
    for value in function.__defaults__ or ():
        _visit(value, found)
    if function.__kwdefaults__:
        for name, value in function.__kwdefaults__.items():
            found.key.append(name)
            _visit(value, found)
    for name, value in globals_of(function, facts):
        _visit(value, found, chains.get(name, _WHOLE))


def is_of_torch(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_TORCH_FOLDER)


def pure_facts(code: CodeType) -> CodeFacts:
    """Facts of code that depends on nothing unseen; raises UnrecognisedError for other code."""
    facts = _codes.get(id(code))
    if facts is None:
        facts = code_facts(code)
        with _lock:
            _codes[id(code)] = facts
            while len(_codes) > _MAX_CODES:
                _codes.popitem(last=False)
    if not facts.pure_lookup:
        raise UnrecognisedError
    return facts


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise UnrecognisedError from None


def globals_of(function: FunctionType, facts: CodeFacts) -> Iterator[tuple[str, Any]]:
    """Names and values of the globals that a function reads."""
    space = function.__globals__
    for name in facts.global_names:
        value = space.get(name, _BUILTINS.get(name, _MISSING))
        if value is _MISSING:
            raise UnrecognisedError
        yield name, value


def _visit_bound_method(method: MethodType, found: Dependencies) -> None:
    _visit_method(method.__func__, method.__self__, found)


def _visit_callable(mod: Any, found: Dependencies) -> None:
    """An object that is called: as its method `__call__`."""
    found.rigid = True
    found.key.append(type(mod))
    _visit_method(_class_attribute(type(mod), "__call__"), mod, found)
    found.rigid = False


def _visit_method(function: Any, owner: Any, found: Dependencies) -> None:
    """A method, with those attributes of its object that its code reads from its first argument."""
    if type(function) is not FunctionType or not function.__code__.co_argcount:
        raise UnrecognisedError
    if function.__code__.co_filename.startswith(_TORCH_FOLDER):
        raise UnrecognisedError
    found.key.append(MethodType)
    seen = (id(function), found.rigid) in found.functions
    _visit_function(function, found)
    if seen:  # with the same object or another, whose attributes have not been looked at
        raise UnrecognisedError
    first = function.__code__.co_varnames[0]
    _visit(owner, found, pure_facts(function.__code__).chains.get(first, ()))


def _visit_object(owner: Any, found: Dependencies, chains: tuple[Chain, ...]) -> None:
    """The attributes of `owner` at the end of each chain."""
    rigid, found.rigid = found.rigid, True
    found.key.append(type(owner))
    for chain in chains:
        if not chain:
            raise UnrecognisedError
        value, rest = attribute(owner, chain[0], found), chain[1:]
        if value is not _MISSING:
            _visit(value, found, (rest,))
    found.rigid = rigid


def attribute(owner: Any, name: str, found: Dependencies | None) -> Any:
    """An attribute that is plain data, or _MISSING after visiting a method."""
    kind = type(owner)
    if isinstance(owner, ModuleType):
        return _present(vars(owner), name)
    if kind.__getattribute__ is not object.__getattribute__ or isinstance(owner, type):
        raise UnrecognisedError
    of_class = _class_attribute(kind, name)
    if hasattr(type(of_class), "__set__"):  # a property or a slot
        raise UnrecognisedError
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    if of_class is _MISSING:
        return _module_attribute(owner, own, name)
    if found is not None and type(of_class) is FunctionType:
        _visit_method(of_class, owner, found)
        return _MISSING
    if hasattr(type(of_class), "__get__"):
        raise UnrecognisedError
    return of_class


def _class_attribute(kind: type, name: str) -> Any:
    return next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), _MISSING)


def _module_attribute(owner: Any, own: dict[str, Any], name: str) -> Any:
    """A parameter, buffer or submodule."""
    if getattr(type(owner), "__getattr__", None) is not torch.nn.Module.__getattr__:
        raise UnrecognisedError
    for table in ("_parameters", "_buffers", "_modules"):
        if name in own.get(table, ()):
            return own[table][name]
    raise UnrecognisedError


def _present(space: dict[str, Any], name: str) -> Any:
    if name not in space:
        raise UnrecognisedError
    return space[name]


_VISITORS: dict[type, Callable[[Any, Dependencies], None]] = {
    float: _visit_float,
    int: _visit_int,
    **dict.fromkeys(
        (bool, str, type(None), torch.dtype, torch.device, type(...), complex), _visit_plain
    ),
    torch.Tensor: _visit_tensor,
    torch.nn.Parameter: _visit_tensor,
    FunctionType: _visit_function,
    MethodType: _visit_bound_method,
    functools.partial: _visit_partial,
    list: _visit_sequence,
    tuple: _visit_sequence,
    dict: _visit_dict,
}


# The same visit, which puts proxies in place of `Dependencies.numbers`, in the same order.


def with_numbers(value: Any, proxies: Iterator[NumberProxy], twins: dict[int, Any]) -> Any:
    """A copy of `value` in which each captured number is the next proxy.

    Args:
        twins: copies of functions by the identity of the original; empty at first.
    """
    kind = type(value)
    if kind is float or kind is int:
        return next(proxies)
    if kind is list or kind is tuple:
        return kind(with_numbers(v, proxies, twins) for v in value)
    if kind is dict:
        return {k: with_numbers(v, proxies, twins) for k, v in value.items()}
    if kind is functools.partial:
        function = with_numbers(value.func, proxies, twins)
        args = [with_numbers(v, proxies, twins) for v in value.args]
        named = {k: with_numbers(v, proxies, twins) for k, v in value.keywords.items()}
        return functools.partial(function, *args, **named)
    if kind is MethodType:
        twin = with_numbers(value.__func__, proxies, twins)
        return MethodType(twin, value.__self__)
    if kind is not FunctionType or value.__code__.co_filename.startswith(_TORCH_FOLDER):
        return value
    if id(value) in twins:
        if twins[id(value)] is None:  # a function that reaches itself
            raise UnrecognisedError
        return twins[id(value)]
    twins[id(value)] = None
    twin = twins[id(value)] = _twin_function(value, proxies, twins)
    return twin


def _twin_function(
    function: FunctionType, proxies: Iterator[NumberProxy], twins: dict[int, Any]
) -> FunctionType:
    cells = tuple(
        CellType(with_numbers(_contents(c), proxies, twins)) for c in function.__closure__ or ()
    )
    defaults = tuple(with_numbers(v, proxies, twins) for v in function.__defaults__ or ())
    named = {k: with_numbers(v, proxies, twins) for k, v in (function.__kwdefaults__ or {}).items()}
    space = dict(function.__globals__)
    for name, found in globals_of(function, pure_facts(function.__code__)):
        space[name] = with_numbers(found, proxies, twins)
    twin = FunctionType(
        function.__code__, space, function.__name__, defaults or None, cells or None
    )
    twin.__kwdefaults__ = named or None
    return twin
