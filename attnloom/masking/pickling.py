"""Pickling of mods, local closures and lambdas included, so that masks cross process borders.

A function that can be imported by name is pickled by name. Any other is pickled as its code, its
cells and the globals it names; such a pickle is read by the same minor version of Python. Tensors
are handed back beside the bytes, so that whoever pickles them (torch.save, a DataLoader worker)
shares or maps their storage as usual.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any

import torch

from attnloom.errors import ModError
from attnloom.masking.captures import referenced_globals
from attnloom.trace.names import mod_name

_PYTHON = sys.version_info[:2]


def dump_mod(mod: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The mod as bytes, and the tensors it captures.

    Raises:
        ModError: the mod captures an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _ModPickler(buffer)
    try:
        pickler.dump((_PYTHON, mod))
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModError(
            f"mask_mod {mod_name(mod)!r} cannot be pickled: {error}. It "
            "captures an object that has no pickled form; capture tensors and numbers instead."
        ) from error
    return buffer.getvalue(), pickler.tensors


def load_mod(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `dump_mod`."""
    _, mod = _ModUnpickler(io.BytesIO(data), tensors).load()
    return mod


class _ModPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=4)
        self.tensors: list[torch.Tensor] = []
        self._slots: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._slots:
            self._slots[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._slots[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.CodeType):
            return _load_code, (_PYTHON, marshal.dumps(obj))
        if isinstance(obj, types.CellType):
            # The contents come as state, after the cell is memoised: a cell may lead to itself.
            try:
                state = (obj.cell_contents,)
            except ValueError:
                state = ()
            return _empty_cell, (), state, None, None, _fill_cell
        if isinstance(obj, types.FunctionType) and not _is_importable(obj):
            return _reduce_function(obj)
        return NotImplemented


class _ModUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def _is_importable(fn: types.FunctionType) -> bool:
    """By name, in another process too: __main__ need not be the same program there."""
    if fn.__module__ in ("__main__", "__mp_main__", None):
        return False
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is fn


def _reduce_function(fn: types.FunctionType) -> tuple:
    named = referenced_globals(fn.__code__) & fn.__globals__.keys()
    state = {
        "globals": {name: fn.__globals__[name] for name in sorted(named)},
        "defaults": fn.__defaults__,
        "kwdefaults": fn.__kwdefaults__,
        "attributes": fn.__dict__,
        "names": (fn.__qualname__, fn.__module__, fn.__doc__),
    }
    arguments = (fn.__code__, fn.__name__, fn.__closure__)
    return _make_function, arguments, state, None, None, _complete_function


def _make_function(
    code: types.CodeType, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(code, {"__builtins__": __builtins__}, name, None, closure)


def _complete_function(fn: types.FunctionType, state: dict[str, Any]) -> None:
    fn.__globals__.update(state["globals"])
    fn.__defaults__ = state["defaults"]
    fn.__kwdefaults__ = state["kwdefaults"]
    fn.__dict__.update(state["attributes"])
    fn.__qualname__, fn.__module__, fn.__doc__ = state["names"]
    fn.__globals__["__name__"] = fn.__module__


def _load_code(python: tuple[int, int], data: bytes) -> types.CodeType:
    if python != _PYTHON:
        raise ModError(
            f"the mask_mod was pickled by Python {python[0]}.{python[1]} and is read by "
            f"{_PYTHON[0]}.{_PYTHON[1]}; the code of a local function does not carry over. Define "
            "the mask_mod at the top level of an importable module."
        )
    return marshal.loads(data)


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, state: tuple) -> None:
    if state:
        cell.cell_contents = state[0]
