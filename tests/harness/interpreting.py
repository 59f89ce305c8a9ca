"""What Triton's interpreter does over and over, done once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextlib.contextmanager
def language_replaced_once() -> Iterator[None]:
    """Triton's functions stay replaced by those of numpy. The interpreter replaces them anew at
    every call of a device function, in which it spent a third of its time."""
    from triton import language
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()
    stays = SimpleNamespace(restore=lambda: None)

    def replace_once(function: Any) -> SimpleNamespace:
        names = {id(value) for value in function.__globals__.values()}
        modules = tuple(module for module in (language, language.core) if id(module) in names)
        if modules not in replaced:
            replace(function)
            replaced.add(modules)
        return stays

    with mock.patch.object(interpreter, "_patch_lang", replace_once):
        yield
