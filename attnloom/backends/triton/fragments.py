"""From programs to fragment modules, one a structure, made in memory.

What runs is the text that this process wrote: no module is read from disk, where somebody else
could have put it. Triton's own disk cache, which keys on the source of a jit function, hits in the
next process all the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import linecache
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from triton.runtime.jit import JITFunction

from attnloom.backends.triton import emit
from attnloom.ir.node import Program


@dataclass(frozen=True, slots=True)
class Fragment:
    """The three jit functions of one mod: values by head, by row, and the rest."""

    head: JITFunction
    row: JITFunction
    body: JITFunction


@functools.lru_cache(maxsize=1024)
def score_fragment(program: Program, target: emit.Target) -> Fragment:
    return _fragment("score", emit.module_text(emit.emit_score(program, target)))


@functools.lru_cache(maxsize=1024)
def mask_fragment(program: Program, target: emit.Target) -> Fragment:
    return _fragment("mask", emit.module_text(emit.emit_mask(program, target)))


def _fragment(prefix: str, text: str) -> Fragment:
    module = load_module(text)
    return Fragment(*(getattr(module, f"{prefix}_{part}") for part in ("head", "row", "body")))


class _Text(importlib.abc.ExecutionLoader):
    """A module of this text. `inspect`, by which Triton finds the source of a function, asks for it
    here; no file has the module's name, which only lies where nobody else can put one."""

    def __init__(self, name: str, text: str) -> None:
        self._text = text
        self._path = str(Path(__file__).with_name(f"{name}.py"))

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_source(self, fullname: str) -> str:
        return self._text


def load_module(text: str) -> ModuleType:
    """The module that a text is; the same one for the same text."""
    name = f"attnloom_fragment_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    with _lock:  # threads find it whole or not at all
        found = sys.modules.get(name)
        if found is not None:
            return found
        spec = importlib.util.spec_from_loader(name, _Text(name, text))
        assert spec is not None and spec.loader is not None and spec.origin is not None
        module = importlib.util.module_from_spec(spec)
        # an entry without a time of change is never compared with a file
        linecache.cache[spec.origin] = (len(text), None, text.splitlines(True), spec.origin)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # also a KeyboardInterrupt
            del sys.modules[name]
            raise
        return module


_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked off."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
