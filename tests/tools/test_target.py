"""Finding mods by name, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnloom.errors import ModError, OptionError
from attnloom.tools.target import resolve

MODS = "tests.tools.mods"
FILE = str(Path(__file__).parent / "mods.py")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{MODS}:learned", "score_mod"),
        (f"{MODS}:documented", "mask_mod"),
        (f"{FILE}:window(left=8)", "mask_mod"),
        (f"{MODS}:alibi(8)", "score_mod"),
        (f"{MODS}:layer.score_mod", "score_mod"),
        # a method of a new object was refused
        (f"{MODS}:Table().score_mod", "score_mod"),
        (f"{MODS}:[learned]", None),
        (f"{MODS}:(learned or alibi)(8)", None),
    ],
)
def test_forms(text, kind):
    if kind is None:
        with pytest.raises(OptionError, match="is not a name or a call"):
            resolve(text)
        return
    target = resolve(text)
    assert target.kind == kind
    assert callable(target.mod)


def test_arguments_reach_the_factory():
    mod = resolve(f"{MODS}:window(left=3)").mod
    assert mod(0, 0, 5, 2)
    assert not mod(0, 0, 5, 1)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("learned", OptionError, "'learned' does not name a mod. Write package.module:function"),
        ("no.such:mod", OptionError, "there is no module 'no' (looked in"),
        ("no_such.py:mod", OptionError, "there is no file 'no_such.py'"),
        (f"{MODS}:lerned", OptionError, "'tests.tools.mods' has no 'lerned'. It defines: learned"),
        (f"{MODS}:layer.nothing", OptionError, "'tests.tools.mods:layer' has no 'nothing'"),
        (f"{MODS}:alibi(eight)", OptionError, "'alibi(eight)' has an argument that is no literal"),
        (f"{MODS}:alibi(*[1])", OptionError, "is no literal"),
        (f"{MODS}:alibi(**{{}})", OptionError, "is no literal"),
        (f"{MODS}:alibi(1, 2)", OptionError, "failed with TypeError: alibi() takes 1 positional"),
        (f"{MODS}:documents(1)", OptionError, "'documents' is a Tensor and cannot be called"),
        (f"{MODS}:1 + 1", OptionError, "is not a name or a call"),
        (f"{MODS}:(", OptionError, "is not a name or a call"),
        (f"{MODS}:pair()", ModError, "'pair' is not a function but a tuple of 2 (write a function"),
        (f"{MODS}:documents", ModError, "'documents' is not a function but tensor("),
        (f"{MODS}:three", ModError, "'three(a, b, c)' takes 3 positional arguments"),
        (f"{MODS}:window", ModError, "If it is a factory that makes a mod, call it: 'window(...)'"),
    ],
)
def test_errors(text, error, said):
    with pytest.raises(error) as caught:
        resolve(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\nimport nothing_of_that_name\n", "ModuleNotFoundError: No module named 'nothing_"),
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero (broken.py:2)"),
        ("x = 1\ndef f(:\n", "(broken.py:2)"),
    ],
)
def test_a_module_that_fails_names_its_line(tmp_path, source, said):
    path = tmp_path / "broken.py"
    path.write_text(source)
    try:
        with pytest.raises(OptionError) as caught:
            resolve(f"{path}:f")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("broken", None)
    assert said in str(caught.value)
    assert f"importing '{path}' failed with" in str(caught.value)


def test_a_module_missing_inside_is_not_taken_for_the_module_asked_for(tmp_path, monkeypatch):
    (tmp_path / "outer_mod.py").write_text("import inner_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match="importing 'outer_mod' failed with ModuleNotFoundError"):
        resolve("outer_mod:f")


def test_a_path_without_py_gets_a_hint(tmp_path, monkeypatch):
    (tmp_path / "mods").mkdir()
    (tmp_path / "mods" / "near.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"For a file write 'mods/near\.py:\.\.\.'"):
        resolve("mods/near:f")
