"""What a kernel on disk is found by: the text of the modules that its source lies in.

Triton makes this key from the syntax of every function that a kernel reaches, some sixty, walked
node by node: half of the time that a first call in a new process took. And it leaves builtins out,
functions that run while a kernel is compiled: after a change, kernels of the old ones were found.

Here the key of a jit function of ours is a digest of whole modules: its own, those whose jit
functions, aggregates and builtins it has names for, and so on; values of constants count beside
their names. No address and no place of an installation is in it, so that caches can be shared.
Triton's digest of itself, a part of every key, has its `language`, but not Gluon's, which is added.

Left to Triton: functions with closures, those that reach jit functions of others, and modules whose
file was changed since this process began: memory may hold the old text, which a kernel must not be
kept under the new one for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from attnloom.backends.triton import sources
from attnloom.backends.triton.installation import gluon_digest

sources.install()
_GLUON = "triton.experimental"
_CONSTANTS = (bool, int, float, str)
# Before any module of kernels, all of which import this one, was read. File systems are a little
# late with what they note.
_BEGAN_NS = time.time_ns() - 1_000_000_000


class _UnknownSourceError(Exception):
    """A function is not in a module that can be read."""


def key_of(function: Any) -> str:
    """`cache_key` of a jit function, in less time than Triton takes."""
    give_key(function)
    return function.cache_key


def give_key(function: Any) -> None:
    """Let Triton find the key of a jit function made; interpreted ones have none."""
    if getattr(function, "hash", "") is None:
        with contextlib.suppress(_UnknownSourceError):  # then Triton looks for itself
            function.hash = _key(function)


def _key(function: Any) -> str:
    if function.fn.__closure__:
        raise _UnknownSourceError
    name = f"{function.fn.__qualname__} {function.starting_line_number}"
    text = f"{name} {_reached(function.fn.__module__)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _reached(first: str) -> str:
    """A digest of a module and all that its kernels reach."""
    texts: dict[str, str] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name == _GLUON:
            texts[name] = gluon_digest()
        elif name not in texts:
            texts[name], others = _read(_unchanged(name))
            waiting += others
    parts = [f"{name} {text}\n" for name, text in sorted(texts.items())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _unchanged(name: str) -> str:
    """The name of a module of ours whose file is as it was when this process began."""
    module = sys.modules.get(name)
    if module is None or not name.startswith(sources.OURS):
        raise _UnknownSourceError
    spec = module.__spec__
    if isinstance(getattr(spec, "loader", None), SourceFileLoader):
        try:
            changed = Path(spec.origin).stat().st_ctime_ns  # type: ignore[union-attr, arg-type]
        except OSError:
            raise _UnknownSourceError from None
        if changed > _BEGAN_NS:
            raise _UnknownSourceError
    return name


@functools.lru_cache(maxsize=4096)
def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """A digest of a module's text and constants, and the modules that it leads to."""
    module = sys.modules[name]
    values = {k: v for k, v in sorted(vars(module).items()) if not k.startswith("__")}
    # what runs while a kernel is compiled is Python, and may call anything
    runs_python = any(_is_python(v) and _module_of(v) == name for v in values.values())
    parts, others = [_text(module)], set[str]()
    for variable, value in values.items():
        if isinstance(value, (tl.constexpr, *_CONSTANTS)):
            parts.append(f"{variable} = {value!r}\n")
        elif runs_python or _is_jit(value) or _is_python(value) or isinstance(value, ModuleType):
            others.add(_leads_to(value))
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()
    return digest, tuple(sorted(others - {""}))


def _leads_to(value: object) -> str:
    """The module that has a part in kernels by this value; "" for what has none, or is part of
    Triton's digest of itself."""
    name = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
    if name.startswith(sources.OURS):
        return name
    if name.startswith(_GLUON):
        return _GLUON
    if _is_jit(value) and not name.startswith("triton."):
        raise _UnknownSourceError
    return ""


def _text(module: ModuleType) -> str:
    loader = getattr(module.__spec__, "loader", None)
    text = None
    if isinstance(loader, importlib.abc.InspectLoader):
        try:
            text = loader.get_source(module.__name__)
        except ImportError:  # no source beside the compiled module
            text = None
    if text is None:
        raise _UnknownSourceError
    return text


def _is_jit(value: object) -> bool:
    """Jit functions and functions of constants."""
    return hasattr(type(value), "cache_key")


def _is_python(value: object) -> bool:
    """Builtins, aggregates, functions of constants."""
    return (
        getattr(value, "__triton_builtin__", False) is True
        or getattr(value, "__triton_aggregate__", False) is True
        or (_is_jit(value) and not isinstance(value, JITFunction))
    )


def _module_of(value: object) -> str:
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""
