"""Captured tensors that a call outgrows: `classes[b, q_idx]` with fewer rows than the batch has.

Kernels clamp an index, so that every such lane reads the last element and the result is finite and
wrong. Where the index is a position itself, sizes alone tell. It is a warning and no error, since a
`where` or the mask may keep those lanes from mattering. Factories of mods that make use of the
clamping note a limit that does not bind (`extent.py`): along such an axis nothing is said.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from attnloom.ir.node import BoundProgram
from attnloom.ir.passes.direct_loads import ARGUMENTS, DirectLoad, direct_loads
from attnloom.masking import extent
from attnloom.trace.names import author_of, mod_name, tensor_names

_LIMITS: dict[str, extent.Axis] = {"b": "batch", "h": "heads", "q": "Q_LEN", "kv": "KV_LEN"}
_SIZES = {"b": "the batch is", "h": "heads are", "q": "Q_LEN is", "kv": "KV_LEN is"}
# A dimension of size 1 serves all batch entries or heads, as it does where torch broadcasts.
_SHARED = ("b", "h")
_LIMIT = 4096
_warned: set[tuple[object, ...]] = set()
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, for tools that say the same themselves."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def warn(kind: str, mod: Any, bound: BoundProgram, sizes: Mapping[str, int]) -> None:
    """Warn of each captured tensor that is shorter than a position which indexes it goes; once for
    a mod and the size of a tensor.

    Args:
        sizes: of a call, by "b", "h", "q" and "kv".
    """
    short = _short(mod, bound, sizes)
    if not short or _quiet.get():
        return
    for load in short:
        size = bound.tensors[load.slot].size(load.dim)
        author = author_of(mod)
        code = getattr(author, "__code__", type(author))
        key = (code, bound.program.digest, load.slot, load.dim, size)
        if key not in _warned:
            if len(_warned) >= _LIMIT:
                _warned.clear()
            _warned.add(key)
            warnings.warn(_text(kind, mod, bound, load, sizes), UserWarning, caller_level())


def texts(kind: str, mod: Any, bound: BoundProgram, sizes: Mapping[str, int]) -> list[str]:
    """What `warn` would say, every time."""
    return [_text(kind, mod, bound, load, sizes) for load in _short(mod, bound, sizes)]


def _short(mod: Any, bound: BoundProgram, sizes: Mapping[str, int]) -> list[DirectLoad]:
    found = []
    for load in direct_loads(bound.program):
        have, need = bound.tensors[load.slot].shape[load.dim], sizes[load.axis]
        # Symbolic sizes of an exported graph stand for many: comparing them would fix them.
        if type(have) is not int or type(need) is not int or have >= need:
            continue
        if have == 1 and load.axis in _SHARED:
            continue
        if all(limit.binding for limit in extent.limits_of(mod, axes=(_LIMITS[load.axis],))):
            found.append(load)
    return found


def _text(
    kind: str, mod: Any, bound: BoundProgram, load: DirectLoad, sizes: Mapping[str, int]
) -> str:
    tensor, need = bound.tensors[load.slot], sizes[load.axis]
    have, argument = tensor.size(load.dim), ARGUMENTS[load.axis]
    read = load.shown(tensor_names(mod, bound.tensors)[load.slot])
    return (
        f"{kind} '{mod_name(mod)}' reads {read} of shape {list(tensor.shape)}, but "
        f"{_SIZES[load.axis]} {need}: from {argument}={have} on the index is out of range, where "
        f"kernels clamp it to {max(0, have - 1)}. Capture a tensor of {need} along dimension "
        f"{load.dim}, or write {argument}.clamp(max={max(0, have - 1)}) if that is meant."
    )


def caller_level() -> int:
    """The stack level of the line that called the library, as the function that asks sees it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_library(module: str) -> bool:
    return module.startswith(("attnloom.", "torch.")) or module in ("contextlib", "functools")
