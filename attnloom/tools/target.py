"""Finding a mod by its name on the command line: `package.module:function` or `file.py:function`.

What follows the colon is a dotted name in which calls may stand, with literal arguments, so that a
factory can be named together with its arguments, and a method of a new object: `train.py:alibi(8)`,
`mods.py:window(left=256)`, `model.py:Layer(64).score_mod`. The text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from attnloom.errors import ModError, OptionError, counted

Kind = Literal["score_mod", "mask_mod"]
_FORM = (
    "Write package.module:function or path/file.py:function; for a factory, its call with literal "
    "arguments, as in 'mods.py:alibi(8)' (in quotes, for the shell)."
)
_SIGNATURES: dict[int, Kind] = {4: "mask_mod", 5: "score_mod"}


@dataclass(frozen=True, slots=True)
class Target:
    """A mod that was found.

    text: how it was asked for. mod: the function. kind: told by how many arguments it takes.
    """

    text: str
    mod: Callable[..., Any]
    kind: Kind


def resolve(text: str) -> Target:
    """The mod that `text` names. Imports its module, and calls its factory if arguments are given.

    Raises:
        OptionError: there is no such module, file or name; the module fails to import; the
            arguments are not literals, or the factory refuses them.
        ModError: what was found takes neither 4 nor 5 arguments.
    """
    place, colon, expression = text.partition(":")
    if not (place and colon and expression):
        raise OptionError(f"'{text}' does not name a mod. {_FORM}")
    steps = _parse(text, expression.strip())
    found: Any = _module(place)
    shown = ""
    for step in steps:
        if isinstance(step, ast.Call):
            found = _call(found, step, shown)
            shown = f"{shown}(...)"
        else:
            found = _attribute(found, step, f"{place}:{shown}".rstrip(":"))
            shown = f"{shown}.{step}" if shown else step
    return Target(text, found, kind_of(found, shown.removesuffix("(...)")))


def kind_of(mod: object, name: str) -> Kind:
    """Whether `mod` is a score_mod or a mask_mod.

    Raises:
        ModError: it takes neither 4 nor 5 arguments, or cannot be called.
    """
    if not callable(mod):
        what = f"{mod!r:.60}"
        if isinstance(mod, tuple | list):
            what = f"a {type(mod).__name__} of {len(mod)} (write a function that returns one)"
        raise ModError(
            f"'{name}' is not a function but {what}; a score_mod takes (score, b, h, "
            "q_idx, kv_idx) and a mask_mod (b, h, q_idx, kv_idx)."
        )
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        raise ModError(
            f"'{name}' has no signature to read; wrap it in a function of (score, b, h, q_idx, "
            "kv_idx) or (b, h, q_idx, kv_idx)."
        ) from None
    parameters = signature.parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    kind = _SIGNATURES.get(len(needed))
    if kind is None:
        raise ModError(
            f"'{name}{signature}' takes {counted(len(needed), 'positional argument')}; a score_mod "
            "takes 5, (score, b, h, q_idx, kv_idx), and a mask_mod 4, (b, h, q_idx, kv_idx). If "
            f"it is a factory that makes a mod, call it: '{name}(...)' with its arguments."
        )
    return kind


def _parse(text: str, expression: str) -> list[str | ast.Call]:
    """Names to look up and calls to make, one after the other: `Layer(8).score_mod` is a name, a
    call and a name."""
    try:
        tree: ast.expr = ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise OptionError(f"'{expression}' in '{text}' is not a name or a call. {_FORM}") from None
    steps: list[str | ast.Call] = []
    while isinstance(tree, ast.Attribute | ast.Call):
        if isinstance(tree, ast.Call):
            steps.insert(0, tree)
            tree = tree.func
        else:
            steps.insert(0, tree.attr)
            tree = tree.value
    if not isinstance(tree, ast.Name):
        raise OptionError(f"'{expression}' in '{text}' is not a name or a call. {_FORM}")
    return [tree.id, *steps]


def _module(place: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise OptionError(f"there is no file '{place}' (looked in {Path.cwd()}). Check the path.")
    try:
        return _load_file(Path(place)) if is_file else _import(place)
    except OptionError:
        raise
    except Exception as error:  # whatever the user's module raises while it is imported
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        user = [f for f in frames if "importlib" not in f.filename]
        where = f" ({Path(user[-1].filename).name}:{user[-1].lineno})" if user else ""
        if isinstance(error, SyntaxError) and error.filename:
            where = f" ({Path(error.filename).name}:{error.lineno})"
        raise OptionError(
            f"importing '{place}' failed with {type(error).__name__}: {error}{where}. Fix that, or "
            "move the mod into a module that imports."
        ) from error


def _load_file(path: Path) -> ModuleType:
    """A module from a file, whose folder is importable as it is for `python file.py`."""
    path = path.resolve()
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise  # a module that the user's module imports
        hint = f" For a file write '{name}.py:...'." if Path(f"{name}.py").is_file() else ""
        raise OptionError(
            f"there is no module '{missing}' (looked in {Path.cwd()} and Python's path).{hint} "
            "Check the name, or run where it is installed."
        ) from None


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(owner: Any, name: str, shown: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        names = [n for n, value in vars(owner).items() if callable(value) and n[:1] != "_"]
        own = [n for n in names if getattr(getattr(owner, n), "__module__", "") == _name(owner)]
        listed = f" It defines: {', '.join(own[:20])}." if own else ""
        raise OptionError(f"'{shown}' has no '{name}'.{listed} Check the spelling.") from None


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", ""))


def _call(factory: Any, call: ast.Call, shown: str) -> Any:
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        if any(k.arg is None for k in call.keywords):
            raise ValueError("** is no literal")
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, TypeError):
        raise OptionError(
            f"'{ast.unparse(call)}' has an argument that is no literal. Numbers, strings, True, "
            "None, tuples, lists and dicts of them can be passed; for anything else write a "
            "function without arguments that makes the mod, and name that."
        ) from None
    if not callable(factory):
        raise OptionError(f"'{shown}' is a {type(factory).__name__} and cannot be called.")
    try:
        return factory(*args, **options)
    except Exception as error:  # whatever the user's factory raises
        raise OptionError(
            f"calling '{ast.unparse(call)}' failed with {type(error).__name__}: {error}"
        ) from error
