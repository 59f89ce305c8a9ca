"""Keys of kernels in Triton's cache on disk are the same in every process."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from attnloom.backends import triton as portable  # noqa: E402

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def functions_of(package: ModuleType) -> list[Any]:
    """Every jit function of a package, with its key computed."""
    found: dict[int, Any] = {}
    for entry in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if entry.name.endswith("library_numpy"):  # of the interpreter alone
            continue
        module = importlib.import_module(entry.name)
        found |= {id(f): f for f in vars(module).values() if isinstance(f, JITFunction)}
    for function in found.values():
        assert function.cache_key
    return list(found.values())


def globals_in_keys(functions: list[Any]) -> list[str]:
    """Globals whose text enters a key, as they enter it."""
    return [
        f"{function.__name__}: {name} = {value}"
        for function in functions
        for (name, _), (value, _) in function.used_global_vals.items()
    ]


def test_no_key_of_a_portable_kernel_holds_an_address() -> None:
    assert [text for text in globals_in_keys(functions_of(portable)) if _ADDRESS.search(text)] == []


def test_no_key_of_a_gluon_kernel_holds_an_address() -> None:
    """The backward waited through a constexpr that held a function, whose text has its address: it
    was compiled in every process."""
    if triton.__version__.split(".")[:2] not in (["3", "6"], ["3", "9"]):
        pytest.skip("Gluon differs from version to version of Triton")
    from attnloom.backends import gluon

    texts = globals_in_keys(functions_of(gluon))
    assert texts
    assert [text for text in texts if _ADDRESS.search(text)] == []
