"""Recognising a mod that was traced before, and binding its program to what it captures now.

What a mod depends on is looked at on every call (`dependencies.py`); a mod of which that cannot be
told is traced on every call. Nor is a trace kept that computed something on the host (`exp(p)[h]`,
`t.item()`).

A template is a traced program with the origin of each binding: a captured tensor by identity, a
number by a second trace in which a NumberProxy stands for each captured number. Numbers whose value
the trace looked at (`range(n)`, `w // 2`), and sizes that it read, must be equal for a template to
serve. Templates hold neither tensors nor mods.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnloom import stats
from attnloom.ir.node import BoundProgram, DType, Program
from attnloom.trace.context import Kind, Trace
from attnloom.trace.dependencies import Dependencies, dependencies, with_numbers
from attnloom.trace.symbols import NumberProxy

TraceFunction = Callable[[Kind, Any, DType, torch.device], tuple[BoundProgram, Trace]]
MAX_KEYS = 1024
MAX_TEMPLATES = 16  # for one key: values of numbers that a trace depends on


@dataclass(frozen=True, slots=True)
class _Template:
    """A program and the origin of its bindings.

    tensors: for each slot the position of its tensor among the dependencies.
    numbers: for each slot the position of its number among them, or the number itself.
    fixed: (position, number) that must be equal. sizes: of all tensors, where they matter.
    """

    program: Program
    tensors: tuple[int, ...]
    numbers: tuple[tuple[int, int | float], ...]
    fixed: tuple[tuple[int, int | float], ...]
    sizes: tuple[tuple[int, ...], ...] | None

    def serves(self, found: Dependencies) -> bool:
        numbers = found.numbers
        return all(numbers[place] == value for place, value in self.fixed) and (
            self.sizes is None or self.sizes == found.sizes()
        )

    def bind(self, found: Dependencies) -> BoundProgram:
        tensors, numbers = found.tensors, found.numbers
        return BoundProgram(
            self.program,
            tuple([tensors[place] for place in self.tensors]),
            tuple([value if place < 0 else numbers[place] for place, value in self.numbers]),
        )


_templates: OrderedDict[tuple[Any, ...], list[_Template]] = OrderedDict()
_lock = threading.Lock()


def traced(
    kind: Kind, mod: Any, score_dtype: DType, device: torch.device, trace: TraceFunction
) -> BoundProgram:
    """The bound program of `mod`: by a template, or by `trace`."""
    found = dependencies(mod)
    if found is None:
        stats.count("traces")
        return trace(kind, mod, score_dtype, device)[0]
    key = _key(kind, score_dtype, device, found)
    known = _templates.get(key, ())
    template = _serving(known, found)
    if template is not None:
        return template.bind(found)
    stats.count("traces")
    bound, record = trace(kind, mod, score_dtype, device)
    template = _template(bound, record, found, mod, trace, generalise=bool(known))
    if template is not None:
        _store(key, template)
    return bound


def recognised(
    kind: Kind, mod: Any, score_dtype: DType, device: torch.device
) -> BoundProgram | None:
    """The bound program of a mod by a template, None where it would be traced."""
    found = dependencies(mod)
    if found is None:
        return None
    template = _serving(_templates.get(_key(kind, score_dtype, device, found), ()), found)
    return None if template is None else template.bind(found)


def _key(
    kind: Kind, score_dtype: DType, device: torch.device, found: Dependencies
) -> tuple[Any, ...]:
    return (
        kind,
        score_dtype,
        device,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        *found.key,
    )


def _serving(known: Sequence[_Template], found: Dependencies) -> _Template | None:
    for template in known:
        if template.serves(found):
            return template
    return None


def clear() -> None:
    """Forget every template."""
    with _lock:
        _templates.clear()


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
    found: Dependencies,
    mod: Any,
    trace: TraceFunction,
    generalise: bool,
) -> _Template | None:
    """How to bind the program again, if that is provable.

    The first template of a key demands equal numbers; a second value shows that they vary.
    """
    if record.reads_host:
        return None
    places = {id(tensor): place for place, tensor in enumerate(found.tensors)}
    if any(id(tensor) not in places for tensor in bound.tensors):
        return None
    numbers = tuple((-1, value) for value in bound.numbers)
    fixed = tuple(enumerate(found.numbers))
    if generalise and found.numbers:
        origins = _number_origins(bound, record, found, mod, trace)
        if origins is not None:
            numbers, fixed = origins
    return _Template(
        bound.program,
        tuple(places[id(tensor)] for tensor in bound.tensors),
        numbers,
        fixed,
        found.sizes() if record.reads_sizes else None,
    )


def _number_origins(
    bound: BoundProgram, record: Trace, found: Dependencies, mod: Any, trace: TraceFunction
) -> tuple[tuple[tuple[int, int | float], ...], tuple[tuple[int, int | float], ...]] | None:
    """Trace once more with proxies; (number slots, numbers that must be equal), or None if the
    proxies changed anything."""
    proxies = [NumberProxy(value, place) for place, value in enumerate(found.numbers)]
    remaining = iter(proxies)
    try:
        twin_mod = with_numbers(mod, remaining, {})
        if next(remaining, None) is not None:
            return None
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
