"""Compile-time configuration of a kernel, passed as one constexpr object.

Triton needs `repr`, `hash` and `cache_key` of such an object and reads constexprs from its
attributes; jit functions among them are the points where a user's fragments enter a kernel.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.kernel_keys import key_of


@dataclass(frozen=True)
class KernelConfig:
    """Base of the frozen configurations of each phase; fields are ints, bools, dtypes, jit
    functions."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.isupper() or INTERPRETED or isinstance(value, JITFunction):
            return value
        return tl.constexpr(value)

    def __post_init__(self) -> None:
        # Triton asks at every launch
        parts = (f"{f.name}={_text(object.__getattribute__(self, f.name))}" for f in fields(self))
        text = f"{type(self).__name__}({', '.join(parts)})"
        object.__setattr__(self, "_repr", text)
        object.__setattr__(self, "_hash", hash(text))
        object.__setattr__(self, "cache_key", hashlib.sha256(text.encode()).hexdigest())

    def __repr__(self) -> str:
        return self._repr

    def __hash__(self) -> int:
        return self._hash


def value_of(config: KernelConfig, name: str) -> Any:
    """A field as a Python value, where attribute access gives a constexpr."""
    return object.__getattribute__(config, name)


def _text(value: object) -> str:
    return key_of(value) if isinstance(value, JITFunction) else str(value)
