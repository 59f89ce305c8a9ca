"""Recognising a mod that was traced before, and binding its program to what it captures now.

Recognised are Python functions whose behaviour is determined by their code, closure cells,
defaults and the globals they read, where all of those are tensors, numbers, strings, dtypes,
stateless modules, builtins, or again such functions, also under functools.partial. Lists, dicts,
objects with attributes and methods bound to them are not: such a mod is traced on every call. Nor
is a trace kept that computed something on the host (`exp(p)[h]`, `t.item()`).

A template is a traced program with the origin of each binding: a captured tensor by identity, a
number by a second trace in which a NumberProxy stands for each captured number. Numbers whose value
the trace looked at (`range(n)`, `w // 2`), and sizes that it read, must be equal for a template to
serve. Templates hold neither tensors nor mods.
"""

from __future__ import annotations

import builtins
import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from attnloom import stats
from attnloom.ir.node import BoundProgram, DType, Program
from attnloom.trace.code_facts import CodeFacts, code_facts
from attnloom.trace.context import Kind, Trace
from attnloom.trace.symbols import NumberProxy

TraceFunction = Callable[[Kind, Any, DType, torch.device], tuple[BoundProgram, Trace]]
MAX_KEYS = 1024
MAX_TEMPLATES = 16  # for one key: values of numbers that a trace depends on
_MAX_ENTRIES = 512
_MAX_CODES = 4096

_BUILTINS = vars(builtins)
_PURE_BUILTINS = frozenset(
    _BUILTINS[name]
    for name in (
        "abs all any bool divmod enumerate float int isinstance len list map max min pow print "
        "range repr reversed round slice sorted str sum tuple zip type filter Exception "
        "AssertionError ValueError RuntimeError TypeError"
    ).split()
)
_PLAIN_TYPES = frozenset({bool, str, type(None), torch.dtype, torch.device, type(...), complex})


class _UnrecognisedError(Exception):
    """The mod depends on something whose state cannot be compared."""


@dataclass(slots=True)
class _Captures:
    """What a mod depends on, in a fixed order of visit.

    key: everything but the values of numbers and the identity of tensors.
    functions: order of first visit, by identity; a function is visited once.
    """

    key: list[Any] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    functions: dict[int, int] = field(default_factory=dict)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(t.shape) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class _Template:
    """A program and the origin of its bindings.

    tensors: for each slot the position of its tensor among the captures.
    numbers: for each slot the position of its number among the captures, or the number itself.
    fixed: (position, number) that must be equal. sizes: of all tensors, where they matter.
    """

    program: Program
    tensors: tuple[int, ...]
    numbers: tuple[tuple[int, int | float], ...]
    fixed: tuple[tuple[int, int | float], ...]
    sizes: tuple[tuple[int, ...], ...] | None

    def serves(self, captures: _Captures) -> bool:
        numbers = captures.numbers
        return all(numbers[place] == value for place, value in self.fixed) and (
            self.sizes is None or self.sizes == captures.sizes()
        )

    def bind(self, captures: _Captures) -> BoundProgram:
        tensors, numbers = captures.tensors, captures.numbers
        return BoundProgram(
            self.program,
            tuple([tensors[place] for place in self.tensors]),
            tuple([value if place < 0 else numbers[place] for place, value in self.numbers]),
        )


_templates: OrderedDict[tuple[Any, ...], list[_Template]] = OrderedDict()
_codes: OrderedDict[int, CodeFacts] = OrderedDict()
_lock = threading.Lock()


def traced(
    kind: Kind, mod: Any, score_dtype: DType, device: torch.device, trace: TraceFunction
) -> BoundProgram:
    """The bound program of `mod`: by a template, or by `trace`."""
    captures = _captures(mod)
    if captures is None:
        stats.count("traces")
        return trace(kind, mod, score_dtype, device)[0]
    key = (
        kind,
        score_dtype,
        device,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        *captures.key,
    )
    known = _templates.get(key, ())
    for template in known:
        if template.serves(captures):
            return template.bind(captures)
    stats.count("traces")
    bound, record = trace(kind, mod, score_dtype, device)
    template = _template(bound, record, captures, mod, trace, generalise=bool(known))
    if template is not None:
        _store(key, template)
    return bound


def clear() -> None:
    """Forget every template."""
    with _lock:
        _templates.clear()
        _codes.clear()


def _store(key: tuple[Any, ...], template: _Template) -> None:
    with _lock:
        found = _templates.setdefault(key, [])
        _templates.move_to_end(key)
        # A list that readers iterate over is replaced, never changed.
        _templates[key] = [template, *found][:MAX_TEMPLATES]
        while len(_templates) > MAX_KEYS:
            _templates.popitem(last=False)


def _template(
    bound: BoundProgram,
    record: Trace,
    captures: _Captures,
    mod: Any,
    trace: TraceFunction,
    generalise: bool,
) -> _Template | None:
    """How to bind the program again, if that is provable.

    The first template of a key demands equal numbers; a second value shows that they vary.
    """
    if record.reads_host:
        return None
    places = {id(tensor): place for place, tensor in enumerate(captures.tensors)}
    if any(id(tensor) not in places for tensor in bound.tensors):
        return None
    numbers = tuple((-1, value) for value in bound.numbers)
    fixed = tuple(enumerate(captures.numbers))
    if generalise and captures.numbers:
        found = _number_origins(bound, record, captures, mod, trace)
        if found is not None:
            numbers, fixed = found
    return _Template(
        bound.program,
        tuple(places[id(tensor)] for tensor in bound.tensors),
        numbers,
        fixed,
        captures.sizes() if record.reads_sizes else None,
    )


def _number_origins(
    bound: BoundProgram, record: Trace, captures: _Captures, mod: Any, trace: TraceFunction
) -> tuple[tuple[tuple[int, int | float], ...], tuple[tuple[int, int | float], ...]] | None:
    """Trace once more with proxies; (number slots, numbers that must be equal), or None if the
    proxies changed anything."""
    proxies = [NumberProxy(value, place) for place, value in enumerate(captures.numbers)]
    try:
        twin_mod = _with_numbers(mod, iter(proxies), {})
        twin, twin_record = trace(record.kind, twin_mod, record.score_dtype, record.device)
    except Exception:  # the mod does with its numbers what a proxy cannot, which is no error
        return None
    same = (
        twin.program == bound.program
        and repr(twin.numbers) == repr(bound.numbers)
        and [id(t) for t in twin.tensors] == [id(t) for t in bound.tensors]
        and not twin_record.reads_host
    )
    if not same:
        return None
    numbers = tuple(
        (-1 if source is None else source, value)
        for source, value in zip(twin_record.sources, twin.numbers, strict=True)
    )
    return numbers, tuple((p.position, p.value) for p in proxies if p.observed)


# Visiting what a mod depends on. `_with_numbers` visits in the same order as `_visit`.


def _captures(mod: Any) -> _Captures | None:
    found = _Captures()
    try:
        _visit(mod, found)
    except _UnrecognisedError:
        return None
    tensors = found.tensors
    if len(tensors) > 1:  # which of them are one object
        first: dict[int, int] = {}
        found.key.append(tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)]))
    return found


def _visit(value: Any, found: _Captures) -> None:
    kind = type(value)
    if kind is float:
        found.numbers.append(value)
        # 0.0 == -0.0, but they are different numbers.
        found.key.append(float if value else math.copysign(1.0, value))
    elif kind is int:
        found.numbers.append(value)
        found.key.append(int)
    elif kind is torch.Tensor or kind is torch.nn.Parameter:
        found.tensors.append(value)
        found.key.append(_tensor_key(value))
    elif kind is FunctionType:
        _visit_function(value, found)
    elif kind in _PLAIN_TYPES:
        found.key.append((kind, value))
    elif kind is functools.partial:
        _visit_partial(value, found)
    elif _is_stateless(value, kind):
        found.key.append(value)
    else:
        raise _UnrecognisedError


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.ndim,
        tensor.requires_grad,
        tensor.device,
        tensor.layout,
        tensor.is_neg(),
    )


def _is_stateless(value: Any, kind: type) -> bool:
    if kind is ModuleType or isinstance(value, ModuleType):
        return value.__name__.split(".")[0] in ("torch", "math", "operator")
    if kind is BuiltinFunctionType:
        owner = (getattr(value, "__module__", None) or "torch").split(".")[0]
        return owner in ("torch", "math", "_operator") or value in _PURE_BUILTINS
    return kind is type and value in _PURE_BUILTINS


def _visit_function(function: FunctionType, found: _Captures) -> None:
    if function.__dict__ or len(found.key) > _MAX_ENTRIES:
        raise _UnrecognisedError
    seen = found.functions.setdefault(id(function), len(found.functions))
    if seen != len(found.functions) - 1:
        found.key.append(seen)
        return
    code = function.__code__
    if code.co_filename.startswith(_TORCH_FOLDER):
        found.key.append(function)
        return
    facts = _codes.get(id(code)) or _remember(code)
    if not facts.pure_lookup:
        raise _UnrecognisedError
    found.key.append(facts)
    for cell in function.__closure__ or ():
        _visit(_contents(cell), found)
    for value in function.__defaults__ or ():
        _visit(value, found)
    if function.__kwdefaults__:
        for name, value in function.__kwdefaults__.items():
            found.key.append(name)
            _visit(value, found)
    for value in _globals_of(function, facts):
        _visit(value, found)


_TORCH_FOLDER = torch.__path__[0]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise _UnrecognisedError from None


def _globals_of(function: FunctionType, facts: CodeFacts) -> Iterator[Any]:
    space = function.__globals__
    for name in facts.global_names:
        value = space.get(name, _BUILTINS.get(name, _UnrecognisedError))
        if value is _UnrecognisedError:
            raise _UnrecognisedError
        yield value


def _visit_partial(partial: functools.partial[Any], found: _Captures) -> None:
    found.key.append(("partial", len(partial.args), tuple(partial.keywords)))
    _visit(partial.func, found)
    for value in (*partial.args, *partial.keywords.values()):
        _visit(value, found)


def _remember(code: CodeType) -> CodeFacts:
    facts = code_facts(code)
    with _lock:
        _codes[id(code)] = facts
        while len(_codes) > _MAX_CODES:
            _codes.popitem(last=False)
    return facts


def _with_numbers(value: Any, proxies: Iterator[NumberProxy], twins: dict[int, Any]) -> Any:
    """`value` with a proxy for each number that `_visit` finds in it."""
    kind = type(value)
    if kind is float or kind is int:
        return next(proxies)
    if kind is functools.partial:
        function = _with_numbers(value.func, proxies, twins)
        args = [_with_numbers(v, proxies, twins) for v in value.args]
        named = {k: _with_numbers(v, proxies, twins) for k, v in value.keywords.items()}
        return functools.partial(function, *args, **named)
    if kind is not FunctionType or value.__code__.co_filename.startswith(_TORCH_FOLDER):
        return value
    if id(value) in twins:
        if twins[id(value)] is None:  # a function that reaches itself
            raise _UnrecognisedError
        return twins[id(value)]
    twins[id(value)] = None
    cells = tuple(
        CellType(_with_numbers(_contents(c), proxies, twins)) for c in value.__closure__ or ()
    )
    defaults = tuple(_with_numbers(v, proxies, twins) for v in value.__defaults__ or ())
    named = {k: _with_numbers(v, proxies, twins) for k, v in (value.__kwdefaults__ or {}).items()}
    facts = _codes.get(id(value.__code__)) or _remember(value.__code__)
    space = dict(value.__globals__)
    for name, found in zip(facts.global_names, _globals_of(value, facts), strict=True):
        space[name] = _with_numbers(found, proxies, twins)
    twin = FunctionType(value.__code__, space, value.__name__, defaults or None, cells or None)
    twin.__kwdefaults__ = named or None
    twins[id(value)] = twin
    return twin
