"""`attnloom serve` as a process that is sent signals while it answers."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="needs the extra 'dev'")
for needed in ("uvicorn", "fastapi", "tokenizers", "safetensors"):
    pytest.importorskip(needed, reason="needs the extra 'serve'")


@dataclasses.dataclass
class Served:
    """A process of `attnloom serve --tiny`; its standard error is read as it comes."""

    process: subprocess.Popen[str]
    said: list[str] = dataclasses.field(default_factory=list)
    url: str = ""

    def listen(self) -> None:
        """Return once it takes connections."""
        found: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.said.append(line)
                address = re.search(r"listening on (http://127\.0\.0\.1:\d+/v1) ", line)
                if address:
                    found.put(address[1])

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        self.url = found.get(timeout=120)

    def signalled(self, tokens: int, *signals: signal.Signals) -> list[str]:
        """Lines of a stream of so many tokens, during which the signals are sent."""
        body = {**GREEDY, "max_tokens": tokens, "stream": True}
        lines, waiting = [], list(signals)
        with httpx.stream("POST", f"{self.url}/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    if waiting and len(lines) % 4 == 0:
                        self.process.send_signal(waiting.pop(0))
        return lines

    def exit_code(self) -> int:
        """Of the process, which ends by itself; its last lines are there then."""
        code = self.process.wait(30)
        self._reader.join(10)
        return code


GREEDY: dict[str, Any] = {"model": "tiny", "prompt": "Once", "temperature": 0, "ignore_eos": True}
DRAINS = {"cut off": 1, "finished": 30, "at once": 30}


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Served]]:
    """One server for each test, all started together."""
    command = [sys.executable, "-m", "attnloom", "serve", "--tiny", "--device", "cpu"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = {
        name: Served(
            subprocess.Popen([*command, "--port", "0", "--drain-seconds", str(seconds)], **pipes)
        )
        for name, seconds in DRAINS.items()
    }
    try:
        for one in started.values():
            one.listen()
        yield started
    finally:
        for one in started.values():
            one.process.kill()
            one.process.wait(10)


def text(lines: list[str]) -> str:
    pieces = (json.loads(line[6:])["choices"][0] for line in lines if '"choices"' in line)
    return "".join(piece["text"] for piece in pieces)


def test_sigterm_ends_answers_that_take_too_long_in_their_own_form(
    served: dict[str, Served],
) -> None:
    """Streams broke off without an end, and the process ended as if it had been killed."""
    one, answers = served["cut off"], []

    def whole() -> None:
        body = {**GREEDY, "max_tokens": 4000}
        answers.append(httpx.post(f"{one.url}/completions", json=body, timeout=60))

    beside = threading.Thread(target=whole)
    beside.start()
    *pieces, error, end = one.signalled(4000, signal.SIGTERM)
    beside.join(30)
    assert text(pieces) and end == "data: [DONE]"
    problem = json.loads(error[6:])["error"]
    assert (problem["code"], problem["message"]) == (
        "shutting_down",
        "the server is shutting down.",
    )
    assert answers[0].status_code == 503 and answers[0].json()["error"] == problem
    assert one.exit_code() == 0
    said = "".join(one.said)
    assert "2 answers did not end within 1 s: cut off" in said and "Traceback" not in said


def test_ctrl_c_lets_answers_end_and_takes_no_more(served: dict[str, Served]) -> None:
    """Ctrl-C ended in a traceback, KeyboardInterrupt."""
    one = served["finished"]
    *pieces, end = one.signalled(300, signal.SIGINT)
    assert len(pieces) > 100 and '"finish_reason":"length"' in pieces[-1] and end == "data: [DONE]"
    assert one.exit_code() == 0
    said = "".join(one.said)
    assert "cut off" not in said and "Traceback" not in said
    with pytest.raises(httpx.ConnectError):
        httpx.get(one.url)


def test_a_second_signal_ends_the_process_at_once(served: dict[str, Served]) -> None:
    """A second SIGTERM was ignored for as long as answers went on."""
    one = served["at once"]
    with pytest.raises(httpx.RemoteProtocolError):
        one.signalled(4000, signal.SIGTERM, signal.SIGTERM)
    assert one.exit_code() == -signal.SIGTERM
    assert "Traceback" not in "".join(one.said)
