"""Bodies of requests: what is wrong with them is said in their own words, and what asks for nothing
is let through."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from attnloom.serving.body import parse
from attnloom.serving.problems import ProblemError
from attnloom.serving.wire import Chat, Completion
from tests.serving.endpoint import Running

USER = {"role": "user", "content": "a"}


def completion(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "a", **more}).encode()


def chat(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages or (USER,), **more}).encode()


# name -> (body, param, message)
BAD: dict[str, tuple[bytes, str | None, str]] = {
    "empty": (b" ", None, "the body is empty; it must be a JSON object."),
    "not JSON": (
        b"{", None, "the body is not JSON, at character 1: Expecting property name enclosed in "
        "double quotes.",
    ),
    "not an object": (b"[1]", None, "the body is [1]; it must be a JSON object."),
    "NaN": (
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}', None,
        "the body is not JSON: NaN is not a number that JSON has.",
    ),
    "infinite": (
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature",
        "temperature is Infinity; it must be a number from 0 to 2.",
    ),
    "not UTF-8": (b'{"model": "\xff"}', None, "the body is not UTF-8, at byte 11: 0xff."),
    "half a character": (
        completion(prompt=["a", "b\ud83d"]), "prompt",
        "prompt.1 holds \\ud83d, half of a character; send both halves of the surrogate pair.",
    ),
    "half a character in a name": (
        completion(**{"\ud83d": 1}), "a name in the body",
        "a name in the body holds \\ud83d, half of a character; send both halves of the surrogate "
        "pair.",
    ),
    "twice": (
        b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "prompt",
        "the body has 'prompt' twice in one object; give it once.",
    ),
    "many digits": (
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", None,
        "the body is not JSON: a number has too many digits.",
    ),
    "message": (chat(1), "messages", "messages.0 is 1; it must be an object."),
    "deep": (b"[" * 100_000, None, "the body is nested too deeply."),
    "no prompt": (b'{"model": "tiny"}', "prompt", "prompt is missing."),
    "prompt": (
        completion(prompt=3), "prompt",
        "prompt must be a text, a list of tokens, or a list of texts or of lists of tokens.",
    ),
    "mixed prompts": (
        completion(prompt=["a", [1]]), "prompt",
        "prompt must be a text, a list of tokens, or a list of texts or of lists of tokens.",
    ),
    "unknown": (completion(beam=2), "beam", "parameter 'beam' is not known here."),
    "temperature": (
        completion(temperature=2.5), "temperature",
        "temperature is 2.5; it must be a number from 0 to 2.",
    ),
    "temperature is true": (
        completion(temperature=True), "temperature",
        "temperature is true; it must be a number from 0 to 2.",
    ),
    "too many logprobs": (
        completion(logprobs=21), "logprobs",
        "logprobs is 21; it must be a whole number from 0 to 20.",
    ),
    "logprobs of a chat": (
        chat(logprobs=2), "logprobs", "logprobs is 2; it must be true or false.",
    ),
    "top_logprobs alone": (
        chat(top_logprobs=2), "top_logprobs", "top_logprobs needs logprobs=true beside it.",
    ),
    "n is true": (completion(n=True), "n", "n is true; it must be a whole number from 1 to 128."),
    "max_tokens is 0": (
        completion(max_tokens=0), "max_tokens",
        "max_tokens is 0; it must be a whole number from 1 to 2147483647.",
    ),
    "max_completion_tokens is 0": (
        chat(max_completion_tokens=0), "max_completion_tokens",
        "max_completion_tokens is 0; it must be a whole number from 1 to 2147483647.",
    ),
    "top_k": (
        completion(top_k=10**400), "top_k",
        f"top_k is 1{'0' * 59}...; it must be a whole number from 0 to 2147483647.",
    ),
    "empty stop": (
        completion(stop=""), "stop",
        "stop holds an empty text, which would end every output before it begins.",
    ),
    "stops": (
        completion(stop=["a"] * 17), "stop",
        "stop holds 17 texts; at most 16 may end an output.",
    ),
    "best_of": (
        completion(best_of=3), "best_of",
        "best_of is 3, but n is 1; choosing the best of more texts is not offered.",
    ),
    "no messages": (
        b'{"model": "tiny", "messages": []}', "messages",
        "messages is []; it must be a list of one message or more.",
    ),
    "role": (
        chat({"role": "tool", "content": "m"}), "messages",
        "messages.0.role is 'tool'; it must be system, developer, user or assistant (tools are not "
        "offered).",
    ),
    "content": (
        chat(USER, {"role": "user", "content": None}), "messages",
        "messages.1 has no content, which only the role assistant may lack; this is user's.",
    ),
    "image": (
        chat({**USER, "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}),
        "messages",
        "messages.0.content has a part 1 of type 'image_url'; models read text alone here, in "
        "parts of type 'text'.",
    ),
    "tools": (
        chat(tools=[{"type": "function"}]), "tools",
        "tools asks for what is not offered here; leave it out.",
    ),
    "format": (
        chat(response_format={"type": "json_object"}), "response_format",
        "response_format asks for what is not offered here; leave it out.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    body, param, text = BAD[name]
    with pytest.raises(ProblemError) as caught:
        parse(body, Chat if b'"messages"' in body else Completion)
    assert str(caught.value) == text
    assert caught.value.problem.param == param


NOTHING: dict[str, Any] = {
    "logit_bias": {},
    "service_tier": "auto",
    "store": False,
    "metadata": {"a": "b"},
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "user": "me",
    "n": 1,
}
NOTHING_IN_CHAT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "modalities": ["text"],
}


@pytest.mark.parametrize("value", ["nothing", "null"])
def test_values_that_ask_for_nothing_are_not_refused(value: str) -> None:
    given = NOTHING if value == "nothing" else dict.fromkeys(NOTHING)
    more = NOTHING_IN_CHAT if value == "nothing" else dict.fromkeys(NOTHING_IN_CHAT)
    assert parse(completion(**given), Completion).params(5, 0)
    assert parse(chat(**given, **more), Chat).params(5, 0)


def test_an_assistant_may_have_said_nothing() -> None:
    """Clients send `content: null` back where a message held calls of tools alone."""
    said = parse(chat(USER, {"role": "assistant", "content": None}, USER), Chat).messages
    assert [message.plain()["content"] for message in said] == ["a", "", "a"]


def test_whole_characters_outside_the_first_plane_are_text() -> None:
    assert parse(completion(prompt="a🎉"), Completion).prompt == ["a🎉"]


@pytest.mark.parametrize("kind", ["text/plain", None])
def test_a_body_that_is_not_called_json_is_told_so(running: Running, kind: str | None) -> None:
    """It was called no valid dictionary, however good its JSON was."""
    httpx = pytest.importorskip("httpx", reason="needs the extra 'dev'")
    headers = {"Content-Type": kind} if kind else {}
    answer = httpx.post(f"{running.url}/v1/completions", content=completion(), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == (
        f"Content-Type is {kind or ''!r}; send the body as 'application/json'."
    )


# name -> (path, body, status, param, code, part of the message)
REFUSED: dict[str, tuple[str, bytes, int, str | None, str | None, str]] = {
    "not JSON": ("completions", b"{", 400, None, None, "the body is not JSON, at character 1: "),
    "long text": (
        "completions", completion(prompt="a" * 401), 400, "prompt", "context_length_exceeded",
        "prompt has 401 bytes of text; the 400 tokens that a sequence may have here, of 1 byte at "
        "most, cannot hold more than 400.",
    ),
    "long tokens": (
        "completions", completion(prompt=[1] * 400), 400, "prompt", "context_length_exceeded",
        "400 tokens of prompt and max_tokens 16 are more than the 400 tokens",
    ),
    "long output": (
        "completions", completion(max_tokens=10**9), 400, "max_tokens", "context_length_exceeded",
        "2 tokens of prompt and max_tokens 1000000000 are more than the 400 tokens",
    ),
    "long conversation": (
        "chat/completions", chat({"role": "user", "content": "a" * 390}), 400, "messages",
        "context_length_exceeded", "tokens of prompt and max_tokens 1 are more than the 400 tokens",
    ),
    "no token": ("completions", completion(prompt=[]), 400, "prompt", None, "the prompt is empty"),
    "token": ("completions", completion(prompt=[999]), 400, "prompt", None, "token 999"),
    "many": (
        "completions", completion(n=5), 400, None, None, "asks for 5 texts at once; at most 4",
    ),
    "model": (
        "completions", completion(model="x"), 404, "model", "model_not_found", "no model 'x'",
    ),
    "path": ("nothing", b"{}", 404, None, None, "Not Found"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_are_told_what_is_wrong(running: Running, name: str) -> None:
    httpx = pytest.importorskip("httpx", reason="needs the extra 'dev'")
    path, body, status, param, code, text = REFUSED[name]
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{running.url}/v1/{path}", content=body, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert text in error["message"]


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"Content-Type": "text/plain"}, "Content-Type is 'text/plain'; send the body as"),
        (
            {"Content-Type": "application/json; charset=UTF-16"},
            "Content-Type says charset 'utf-16'; send the body as UTF-8.",
        ),
        ({"Content-Encoding": "gzip"}, "Content-Encoding is 'gzip'; send the body as it is."),
    ],
    ids=["kind", "charset", "coding"],
)
def test_bodies_in_other_forms(running: Running, headers: dict[str, str], text: str) -> None:
    httpx = pytest.importorskip("httpx")
    given = {"Content-Type": "application/json"} | headers
    answer = httpx.post(f"{running.url}/v1/completions", content=completion(), headers=given)
    assert answer.status_code == 415 and answer.json()["error"]["message"].startswith(text)
    plain = {"Content-Type": 'application/json; charset="utf-8"'}
    body = completion(max_tokens=1)
    answer = httpx.post(f"{running.url}/v1/completions", content=body, headers=plain)
    assert answer.status_code == 200


def test_one_of_several_prompts_is_named(running: Running) -> None:
    httpx = pytest.importorskip("httpx")
    body = {"model": "tiny", "prompt": [[1], []]}
    error = httpx.post(f"{running.url}/v1/completions", json=body).json()["error"]
    assert error["message"] == "prompt.1: the prompt is empty; give at least one token."
    assert error["param"] == "prompt"


def test_a_client_that_left_within_its_body_was_a_traceback(running: Running) -> None:
    app, said = running.server.config.app, []
    events = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return events.pop(0)

    async def send(message: Any) -> None:
        said.append(message)

    head = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": head,
        "query_string": b"", "app": app,
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert said[0]["status"] == 499
