"""The troubleshooting page knows every pinned message, and no message that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnloom.api.options import read_options
from attnloom.errors import AttnloomError
from tests.api import test_errors as api_errors
from tests.api import test_options
from tests.compiler import test_errors_trace as trace_errors
from tests.docs.blocks import ROOT
from tests.masks import test_errors as mask_errors
from tests.mods import test_errors as mods_errors
from tests.paged import test_errors as paged_errors
from tests.serving import test_errors as serving_errors
from tests.serving import test_errors_folders as folder_errors
from tests.serving import test_errors_steps as step_errors
from tests.serving import test_static as static_errors

PAGE = ROOT / "docs" / "troubleshooting.md"
ENTRIES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(AttnloomError) as caught:
        call()
    return str(caught.value)


def _parameters(test: Any) -> list[tuple[Any, ...]]:
    (mark,) = (m for m in test.pytestmark if m.name == "parametrize")
    return mark.args[1]


def _pinned() -> Iterator[str]:
    """Every message that the tests of errors pin, as users see it."""
    for kind, cases in (
        ("score_mod", trace_errors.SCORE_ERRORS),
        ("mask_mod", trace_errors.MASK_ERRORS),
    ):
        for mod, _ in cases:
            yield trace_errors._message(mod, kind)
    yield from (text for _, _, text in api_errors.INPUTS.values())
    yield from (api_errors.SMALLER, api_errors.LARGER)
    yield from (text for _, _, text in mods_errors.ERRORS.values())
    yield from _pinned_of_caches()
    for call, _, _ in _parameters(mask_errors.test_errors_name_the_values):
        yield _raised(call)
    for options, _ in _parameters(test_options.test_mistakes):
        yield _raised(lambda options=options: read_options(options))


def _pinned_of_caches() -> Iterator[str]:
    tables = (paged_errors.ERRORS, serving_errors.ERRORS, folder_errors.FOLDERS, step_errors.STEPS)
    for cases in tables:
        yield from (case[-1] for case in cases.values())
    yield serving_errors.UNKNOWN_MODEL
    yield static_errors.NOT_CAPTURED


def _pieces(entry: str) -> list[str]:
    return [piece.strip() for piece in entry.split("…") if piece.strip()]


def _matches(entry: str, message: str) -> bool:
    pattern = ".*".join(map(re.escape, _pieces(entry)))
    return re.search(pattern, message, re.DOTALL) is not None


def test_every_pinned_message_has_an_entry() -> None:
    messages = list(_pinned())
    assert len(messages) > 80
    missing = [m for m in messages if not any(_matches(e, m) for e in ENTRIES)]
    assert not missing, f"add rows to {PAGE.name} for:\n" + "\n".join(missing)


def _literals() -> str:
    """All text literals of the library, one a line; names and values in f-strings as '…'."""
    nodes = (
        node
        for path in (ROOT / "attnloom").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )
    return "\n".join(text for node in nodes for text in _texts(node))


def _texts(node: ast.AST | None) -> list[str]:
    """The text that a node stands for, or each of two."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    return []


def _errors_of(package: str) -> list[str]:
    """Texts of the errors that a package makes, names and values as '…'."""
    return [
        text
        for path in sorted((ROOT / "attnloom" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.endswith("Error")
        and node.func.id != "AssertionError"
        and node.args
        for text in _texts(node.args[0])
    ]


@pytest.mark.parametrize(("package", "least"), [("paged", 28), ("serving", 35)])
def test_every_error_of_caches_and_serving_is_pinned(package: str, least: int) -> None:
    """And so has an entry, as pinned messages have."""
    messages, made = list(_pinned_of_caches()), _errors_of(package)
    assert len(made) >= least
    missing = [text for text in made if not any(_matches(text, m) for m in messages)]
    assert not missing, f"pin in tests/{package}/test_errors.py:\n" + "\n".join(missing)


def test_every_entry_is_a_message() -> None:
    """A message whose text changes takes its entry along."""
    messages, literals = list(_pinned()), _literals()
    gone = [
        entry
        for entry in ENTRIES
        if not any(_matches(entry, message) for message in messages)
        and not all(piece in literals for piece in _pieces(entry))
    ]
    assert not gone, "no message of attnloom says:\n" + "\n".join(gone)


def test_the_entries_are_read() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(ENTRIES) == len(rows) > 60
    assert all(len(entry.replace("…", "").strip()) >= 12 for entry in ENTRIES)


def test_matching() -> None:
    assert _matches("a … c", "xa 1 b c")
    assert not _matches("a … c", "c then a")
