"""From programs to imported fragment modules, one file a structure, shared by all processes.

The file's name is a digest of its text, so that Triton's own disk cache, which keys on the source
of a jit function, hits in the next process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

from triton.runtime.jit import JITFunction

from attnloom.backends.triton import disk, emit
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


def load_module(text: str) -> ModuleType:
    name = f"attnloom_fragment_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if name in sys.modules:
        return sys.modules[name]
    path = disk.folder("fragments") / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        disk.write(path, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
