"""What mkdocs runs on every page: `<!-- docstring: NAME -->` becomes the docs of attnloom.NAME,
where NAME may be that of a module's function: `plots.plot_mask`, `mods.alibi`.

Docstrings have the project's sections (Args, Returns, Raises, Source, Attributes); a class is
followed by its public methods.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

_MARKER = re.compile(r"^<!-- docstring: ([\w.]+) -->$", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source): *(.*)$")
_PLAIN = ("Returns", "Source")
_NAMES = re.compile(r"^\w+(, \w+)*,$")
_ENTRY = re.compile(r"^([*\w., ]+?): +(.*)$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: the page with every marker replaced.

    Raises:
        AttributeError: a marker names nothing that attnloom exports.
    """
    return _MARKER.sub(lambda match: document(match[1]), markdown)


def document(name: str) -> str:
    """Markdown for one public name of attnloom: signature, docstring, methods of a class.

    name: from attnloom on, `flex_attention` or `plots.plot_mask`.
    """
    *modules, name = name.split(".")
    owner = importlib.import_module(".".join(("attnloom", *modules)))
    value = getattr(owner, name)
    if not inspect.isclass(value):
        return _callable_text(name, value)
    parts = [_callable_text(name, value) if _has_signature(value) else render(value)]
    for method, member in _public_methods(value):
        parts.append(f"### {name}.{method}\n\n{_member_text(f'{name}.{method}', member)}")
    return "\n\n".join(parts)


def render(value: Any) -> str:
    """The docstring of `value` as Markdown."""
    lines = (inspect.getdoc(value) or "").splitlines()
    return "\n".join(_rendered(lines)).strip()


def signature(name: str, value: Callable[..., Any]) -> str:
    """`name(...)` with one parameter a line where it is long."""
    found = inspect.signature(value)
    kept = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    result = inspect.Signature.empty if inspect.isclass(value) else found.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {_shown(result)}"
    shown = [_parameter(p) for p in kept]
    first_keyword = next((i for i, p in enumerate(kept) if p.kind is p.KEYWORD_ONLY), None)
    if first_keyword is not None:
        shown.insert(first_keyword, "*")
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {text},\n" for text in shown)
    return f"{name}(\n{inner}){arrow}"


def _callable_text(name: str, value: Callable[..., Any]) -> str:
    return f"```text\n{signature(name, value)}\n```\n\n{render(value)}"


def _member_text(name: str, member: Any) -> str:
    if isinstance(member, property):
        return render(member)
    return _callable_text(name, member)


def _has_signature(cls: type) -> bool:
    own_init = "__init__" in vars(cls) or "__new__" in vars(cls)
    return own_init and not issubclass(cls, Exception)


def _public_methods(cls: type) -> list[tuple[str, Any]]:
    if issubclass(cls, (Exception, tuple, dict)):
        return []
    found = []
    for name in dir(cls):
        static = inspect.getattr_static(cls, name)
        member = static if isinstance(static, property) else getattr(cls, name)
        described = isinstance(member, property) or inspect.isroutine(member)
        if not name.startswith("_") and described and inspect.getdoc(member):
            found.append((name, member))
    return found


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f"*{text}"
    if parameter.annotation is not parameter.empty:
        text += f": {_shown(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        text += f" = {getattr(default, '__name__', None) or repr(default)}"
    return text


def _shown(annotation: Any) -> str:
    """An annotation as it was written; classes by their name."""
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", None) or str(annotation)


def _rendered(lines: list[str]) -> list[str]:
    """Markdown lines; entries of a section become a list."""
    out: list[str] = []
    section = None
    for line in lines:
        heading = _SECTION.match(line)
        if heading:
            section, text = heading.groups()
            out += ["", f"**{section}**", ""]
            if text:
                out += _section_line(section, text)
        elif section and line.startswith("    "):
            out += _section_line(section, line[4:])
        else:
            section = section if not line.strip() else None
            out += _free_line(line)
    return out


def _section_line(section: str, line: str) -> list[str]:
    """An entry of a list, the continuation of one, or plain text."""
    if section in _PLAIN:
        return [line]
    is_entry = not line.startswith(" ") and (_ENTRY.match(line) or _NAMES.match(line))
    return [f"- {_marked(line)}" if is_entry else f"  {line.strip()}"]


def _marked(text: str) -> str:
    """The names that an entry begins with, as code."""
    entry = _ENTRY.match(text)
    if entry is None:
        return text
    names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(","))
    return f"{names}: {entry[2]}"


def _free_line(line: str) -> list[str]:
    """Text outside sections. A line `name: ...` begins an entry of its own."""
    entry = _ENTRY.match(line)
    if entry and " " not in entry[1].replace(", ", ","):
        return ["", _marked(line)]
    return [line]
