"""Keys of kernels in Triton's cache on disk: equal in every process, others for other kernels."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from attnloom.backends import triton as portable  # noqa: E402
from attnloom.backends.triton import kernel_keys  # noqa: E402
from attnloom.backends.triton.fragments import load_module  # noqa: E402
from tests.kernels.gluon_triton import needs_gluon, takes_gluon  # noqa: E402

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def functions_of(package: ModuleType) -> list[Any]:
    """Every jit function of a package, with the key that Triton gives it."""
    found: dict[int, Any] = {}
    for entry in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if entry.name.endswith("library_numpy"):  # of the interpreter alone
            continue
        module = importlib.import_module(entry.name)
        found |= {id(f): f for f in vars(module).values() if isinstance(f, JITFunction)}
    for function in found.values():
        function.hash = None
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
    needs_gluon(also=True)
    from attnloom.backends import gluon

    texts = globals_in_keys(functions_of(gluon))
    assert texts
    assert [text for text in texts if _ADDRESS.search(text)] == []


# Keys by the text of modules.


@pytest.fixture(autouse=True)
def nothing_read() -> Iterator[None]:
    """What a test changed is not remembered."""
    yield
    kernel_keys._read.cache_clear()


def key(function: Any) -> str:
    """As in a new process."""
    kernel_keys._read.cache_clear()
    return kernel_keys._key(function)


def forward_kernel() -> Any:
    from attnloom.backends.triton.forward import forward_kernel

    return forward_kernel


def hopper_kernel() -> Any:
    from attnloom.backends.gluon.forward_sm90 import forward_kernel

    return forward_kernel


def test_no_function_of_ours_is_left_to_triton() -> None:
    from attnloom.backends import gluon

    functions = functions_of(portable)
    if takes_gluon(also=True):
        functions += functions_of(gluon)
    ours = {id(f): f for f in functions if f.fn.__module__.startswith("attnloom.")}
    assert len(ours) > 100
    assert len({key(f) for f in ours.values()}) == len(ours)


@pytest.mark.parametrize("name", ["forward", "tiles", "unpack"])
def test_a_changed_module_changes_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`unpack` holds builtins, which Triton's own keys leave out: after a change of one, kernels
    that were compiled with the old one were found on disk."""
    before, text = key(forward_kernel()), kernel_keys._text
    changed = f"attnloom.backends.triton.{name}"
    monkeypatch.setattr(kernel_keys, "_text", lambda m: text(m) + "# x" * (m.__name__ == changed))
    assert key(forward_kernel()) != before


@pytest.mark.parametrize(
    "name", ["builtins", "rings", "forward_load", "forward_math", "forward_shared"]
)
def test_a_changed_module_changes_the_key_of_a_hopper_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, text = key(hopper_kernel()), kernel_keys._text
    changed = f"attnloom.backends.gluon.{name}"
    monkeypatch.setattr(kernel_keys, "_text", lambda m: text(m) + "# x" * (m.__name__ == changed))
    assert key(hopper_kernel()) != before


def test_modules_of_aggregates_and_builtins_are_reached() -> None:
    """They are no jit functions, and a kernel may have no other name of their module."""
    reached: set[str] = set()
    waiting = [hopper_kernel().__module__]
    while waiting:
        name = waiting.pop()
        if name not in reached and name != "triton.experimental":
            reached.add(name)
            waiting += kernel_keys._read(name)[1]
    short = {name.rpartition(".")[2] for name in reached}
    assert {"builtins", "forward_shared", "rings", "unpack", "forward_load"} <= short


def test_an_aggregate_alone_leads_to_its_module() -> None:
    from triton.language import core

    if not hasattr(core, "_aggregate"):
        pytest.skip("this version of Triton has no aggregates of this name")
    aggregate = load_module(
        HEAD + "@core._aggregate\nclass Pair:\n    a: tl.tensor\n    b: tl.tensor\n"
    )
    found = function(f"from {aggregate.__name__} import Pair\n" + FUNCTION.format("1"))
    assert aggregate.__name__ in kernel_keys._read(found.fn.__module__)[1]


def test_a_file_that_was_changed_since_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is not that of the function in memory."""
    assert key(forward_kernel())
    monkeypatch.setattr(kernel_keys, "_BEGAN_NS", 0)
    with pytest.raises(kernel_keys._UnknownSourceError):
        key(forward_kernel())
    kernel = forward_kernel()
    monkeypatch.setattr(kernel, "hash", None)
    kernel_keys.give_key(kernel)
    assert kernel.hash is None


def test_another_gluon_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before, portable_before = key(hopper_kernel()), key(forward_kernel())
    monkeypatch.setattr(kernel_keys, "gluon_digest", lambda: "another")
    assert key(hopper_kernel()) != before
    assert key(forward_kernel()) == portable_before


HEAD = "import triton\nimport triton.language as tl\nfrom triton.language import core\n"
FUNCTION = "@triton.jit\ndef f(x):\n    return x + {}\n"


def function(text: str) -> Any:
    """`f` of a module of this text."""
    return load_module(HEAD + text).f


def test_values_of_constants_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = function("N = tl.constexpr(3)\n" + FUNCTION.format("N"))
    before = key(found)
    monkeypatch.setitem(found.fn.__globals__, "N", triton.language.constexpr(4))
    assert key(found) != before


def test_line_and_name_count() -> None:
    text = FUNCTION.format(1)
    module = load_module(HEAD + text + text.replace("f(x)", "g(x)"))
    assert len({key(module.f), key(module.g), key(function("\n" + text))}) == 3


def test_functions_of_others_are_left_to_triton() -> None:
    found = function(FUNCTION.format(5))
    theirs = function(FUNCTION.format(6))
    assert key(found)
    theirs.__module__ = "somebody.elses"
    found.fn.__globals__["theirs"] = theirs
    with pytest.raises(kernel_keys._UnknownSourceError):
        key(found)
    assert kernel_keys.key_of(found) == found.cache_key


def test_functions_with_closures_are_left_to_triton() -> None:
    made = load_module(
        HEAD
        + "def make(n):\n    @triton.jit\n    def f(x):\n        return x + n\n    return f\n"
        + "f, g = make(tl.constexpr(1)), make(tl.constexpr(2))\n"
    )
    with pytest.raises(kernel_keys._UnknownSourceError):
        key(made.f)
    assert kernel_keys.key_of(made.f) != kernel_keys.key_of(made.g)


def test_keys_are_those_of_another_process() -> None:
    code = (
        "from attnloom.backends.triton import kernel_keys, forward\n"
        "print(kernel_keys.key_of(forward.forward_kernel))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [key(forward_kernel())]
