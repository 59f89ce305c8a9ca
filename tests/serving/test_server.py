"""The endpoint over loopback, with OpenAI's own client and with clients that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.endpoint import GREEDY, Running, expected

fastapi = pytest.importorskip("fastapi", reason="needs the extra 'serve'")
openai = pytest.importorskip("openai", reason="needs the extra 'dev'")
httpx = pytest.importorskip("httpx", reason="needs the extra 'dev'")


def test_completions(running: Running) -> None:
    client = running.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    answer = client.completions.create(prompt="Once", max_tokens=20, **GREEDY)
    assert answer.choices[0].text == expected("Once", 20)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)
    tokens = client.completions.create(prompt=[256, *b"Once"], max_tokens=20, **GREEDY)
    assert tokens.choices[0].text == answer.choices[0].text


def test_streams_add_up(running: Running) -> None:
    pieces = list(
        running.client().completions.create(
            prompt="Once",
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    *said, last = pieces
    assert "".join(p.choices[0].text for p in said) == expected("Once", 20)
    assert [p.choices[0].finish_reason for p in said[-2:]] == [None, "length"]
    assert last.choices == [] and last.usage.total_tokens == 25


def test_chat(running: Running) -> None:
    client = running.client()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    want = expected("system: Be brief.\nuser: Hello\nassistant:", 10)
    answer = client.chat.completions.create(messages=messages, max_tokens=10, **GREEDY)
    assert answer.choices[0].message.content == want
    stream = client.chat.completions.create(
        messages=messages, max_completion_tokens=10, stream=True, **GREEDY
    )
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == want


def test_seeds(running: Running) -> None:
    client = running.client()
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 12}
    texts = [client.completions.create(seed=s, **asked).choices[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_texts(running: Running) -> None:
    text = expected("Once", 40)
    stop = next(text[i : i + 2] for i in range(8, 30) if text[i : i + 2].isprintable())
    asked = {"prompt": "Once", "max_tokens": 40, "stop": [stop], **GREEDY}
    answer = running.client().completions.create(**asked)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    pieces = list(running.client().completions.create(stream=True, **asked))
    assert "".join(p.choices[0].text for p in pieces) == text[: text.index(stop)]


def test_many_clients_at_once(running: Running) -> None:
    def ask(i: int) -> str:
        while True:
            try:
                answer = running.client().completions.create(
                    prompt="x" * i, max_tokens=5 + i, **GREEDY
                )
                return answer.choices[0].text
            except openai.RateLimitError:
                time.sleep(0.05)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(12)))
    assert found == [expected("x" * i, 5 + i) for i in range(12)]


def test_the_client_knows_our_errors(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p is 2; it must be a number above 0"):
        running.client().completions.create(prompt="a", top_p=2, model="tiny")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        running.client().completions.create(prompt="a", model="gpt")


def test_a_body_without_end_is_refused(running: Running) -> None:
    def forever() -> Iterator[bytes]:
        for _ in range(100):
            yield b"[" * (1 << 20)

    try:
        answer = httpx.post(f"{running.url}/v1/completions", content=forever())
        assert answer.status_code == 413
    except httpx.TransportError:
        pass  # the connection was closed while we were still sending
    answer = httpx.post(f"{running.url}/v1/completions", content=b" " * ((8 << 20) + 1))
    assert answer.status_code == 413
    assert "longer than 8388608 bytes" in answer.json()["error"]["message"]
    assert running.client().completions.create(prompt="a", max_tokens=2, **GREEDY)


def _send(running: Running, stream: bool, max_tokens: int) -> socket.socket:
    """A request on a bare socket, whose answer nobody reads."""
    body = json.dumps(
        {"model": "tiny", "prompt": "z", "max_tokens": max_tokens, "stream": stream,
         "ignore_eos": True, "temperature": 0}
    ).encode()  # fmt: skip
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "waiting"])
def test_a_client_that_is_killed_disturbs_nobody(
    running: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = running.engine._runner.run

    def slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return step(*args)

    monkeypatch.setattr(running.engine._runner, "run", slowly)
    cancelled = running.engine.metrics.finished["cancelled"]
    connection = _send(running, stream, 390)
    running.wait_until("running", 1)
    if stream:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            running.client().completions.create, prompt="Once", max_tokens=30, **GREEDY
        )
        connection.close()
        assert other.result().choices[0].text == expected("Once", 30)
    running.wait_until("running", 0)
    assert running.engine.metrics.finished["cancelled"] == cancelled + 1


def test_overload_is_answered_429(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is held in a step, 4 wait, the next is told to come back; the others are served."""
    gate = threading.Event()
    run = running.engine._runner.run
    refused = running.metric("refused_total")

    def held(*args: Any) -> Any:
        assert gate.wait(30)
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(running.engine._runner, "run", held)
        connections = [_send(running, True, 20)]
        running.wait_until("running", 1)
        connections += [_send(running, True, 20) for _ in range(4)]
        running.wait_until("waiting", 4)
        with pytest.raises(openai.RateLimitError, match="4 requests are waiting") as caught:
            running.client().completions.create(prompt="a", max_tokens=2, **GREEDY)
        gate.set()
    assert caught.value.response.headers["Retry-After"] == "1"
    assert caught.value.code == "overloaded"
    assert running.metric("refused_total") == refused + 1
    want = expected("z", 20)
    for connection in connections:
        assert _said(connection) == want


def _said(connection: socket.socket) -> str:
    """The text of a stream, read to its end."""
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(4096)
    connection.close()
    events = [line[6:] for line in received.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_step_that_fails_is_a_500_and_the_server_goes_on(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(running.engine._runner, "run", fail)
        with pytest.raises(openai.InternalServerError, match="the model failed: MemoryError"):
            running.client().completions.create(prompt="Once", max_tokens=5, **GREEDY)
        pieces = running.client().completions.create(
            prompt="Once", max_tokens=5, stream=True, **GREEDY
        )
        with pytest.raises(openai.APIError, match="the model failed"):
            list(pieces)
    answer = running.client().completions.create(prompt="Once", max_tokens=5, **GREEDY)
    assert answer.choices[0].text == expected("Once", 5)
    assert running.metric("running") == 0


def test_an_error_of_the_server_has_the_same_form(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(messages: Any) -> list[int]:
        raise KeyError("x")

    monkeypatch.setattr(running.engine.tokenizer, "chat", fail)
    with pytest.raises(openai.InternalServerError, match="the server failed: KeyError"):
        running.client().chat.completions.create(
            messages=[{"role": "user", "content": "a"}], **GREEDY
        )


def test_metrics_and_health(running: Running) -> None:
    before = running.metric("output_tokens_total")
    running.client().completions.create(prompt="Once", max_tokens=9, **GREEDY)
    assert running.metric("output_tokens_total") == before + 9
    assert running.metric("pages") == 64
    text = httpx.get(f"{running.url}/metrics").text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
    assert 'attnloom_request_seconds_bucket{le="+Inf"}' in text
    assert httpx.get(f"{running.url}/health").json() == {"alive": True}
