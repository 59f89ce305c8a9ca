"""From the bytes of a request to its checked form; what is wrong is said in the request's words."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from attnloom.serving.problems import Problem, ProblemError

# Above this a thread reads the body, so that others are answered meanwhile.
LONG_BYTES = 1 << 16

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHOWN = 60  # characters of a value in a message

Form = TypeVar("Form", bound=BaseModel)


async def read(http: HttpRequest, form: type[Form]) -> Form:
    """The body of a request.

    Raises:
        ProblemError: it is not JSON, or not of this form.
    """
    try:
        raw = await http.body()
    except ClientDisconnect:
        raise ProblemError(Problem(499, "the client left within its body.")) from None
    _check_headers(http.headers)
    if len(raw) < LONG_BYTES:
        return parse(raw, form)
    return await run_in_threadpool(parse, raw, form)


def _check_headers(headers: Headers) -> None:
    """Raise ProblemError unless the body is JSON in UTF-8, as it is."""
    kind, _, rest = headers.get("content-type", "").lower().partition(";")
    charset = rest.partition("charset=")[2].partition(";")[0].strip(' "')
    coding = headers.get("content-encoding", "identity").lower()
    if kind.strip() != "application/json":
        raise _unread(f"Content-Type is {kind.strip()!r}; send the body as 'application/json'.")
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise _unread(f"Content-Type says charset {charset!r}; send the body as UTF-8.")
    if coding not in ("", "identity"):
        raise _unread(f"Content-Encoding is {coding!r}; send the body as it is.")


def _unread(message: str) -> ProblemError:
    return ProblemError(Problem(415, message))


def parse(raw: bytes, form: type[Form]) -> Form:
    """What the bytes say; raises as `read` does."""
    given = _json(raw)
    if not isinstance(given, dict):
        raise _problem(f"the body is {_shown(given)}; it must be a JSON object.")
    try:
        return form.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path, wrong = first["loc"], first.get("ctx", {}).get("error")
    param = path[0] if path else getattr(wrong, "param", None)
    raise _problem(_said(first, form), None if param is None else str(param))


def _json(raw: bytes) -> Any:
    if not raw.strip():
        raise _problem("the body is empty; it must be a JSON object.")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise _problem(f"the body is not UTF-8, at byte {error.start}: 0x{byte:02x}.") from None
    try:
        given = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise _problem(f"the body is not JSON, at character {error.pos}: {error.msg}.") from None
    except RecursionError:
        raise _problem("the body is nested too deeply.") from None
    except ProblemError:
        raise
    except ValueError as error:
        said = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise _problem(f"the body is not JSON: {said}.") from None
    if _SURROGATE.search(text):
        _check_characters(given)
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _problem(f"the body has {twice!r} twice in one object; give it once.", twice)
    return found


def _no_number(name: str) -> NoReturn:
    text = f"{name} is not a number that JSON has"
    raise ValueError(text)


def _check_characters(given: Any) -> None:
    """Halves of surrogate pairs are JSON, but no text."""
    waiting: list[tuple[str, Any]] = [("", given)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}", part) for name, part in value.items()]
            waiting += [("a name in the body", name) for name in value]
        elif isinstance(value, list):
            waiting += [(f"{place}.{i}", part) for i, part in enumerate(value)]
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                place = place.removeprefix(".") or "the body"
                half = f"\\u{ord(value[error.start]):04x}"
                raise _problem(
                    f"{place} holds {half}, half of a character; send both halves of the "
                    "surrogate pair.",
                    place.partition(".")[0],
                ) from None


def _said(first: Any, form: type[BaseModel]) -> str:
    """A mistake in words. Errors of our own validators go on after the place; for others the
    field's description says what may be there."""
    path, kind = first["loc"], first["type"]
    place = ".".join(map(str, path))
    if kind == "value_error":
        return f"{place} {first['ctx']['error']}".strip()
    if kind == "missing":
        return f"{place} is missing."
    if kind == "extra_forbidden":
        return f"parameter {place!r} is not known here."
    if kind == "model_type":
        return f"{place} is {_shown(first['input'])}; it must be an object."
    field = form.model_fields.get(str(path[0])) if len(path) == 1 else None
    if field is not None and field.description:
        return f"{place} is {_shown(first['input'])}; it must be {field.description}."
    return f"{place} is {_shown(first['input'])}: {first['msg']}."


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _problem(message: str, param: str | None = None) -> ProblemError:
    return ProblemError(Problem(400, message, param=param))
