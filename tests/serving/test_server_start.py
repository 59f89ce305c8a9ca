"""`attnloom serve` from its first line to its last: mistakes are told before a model is read, and a
server that is told to stop finishes what it began."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from attnloom.cli.main import main
from attnloom.serving import FolderTokenizer, ModelError, RequestError
from attnloom.serving.launch import ServeConfig, build_engine
from tests.serving.endpoint import GREEDY, expected, make_engine
from tests.serving.models import LLAMA
from tests.serving.test_server_long_texts import make_tokenizer

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs the extra 'dev'")
pytest.importorskip("tokenizers", reason="needs the extra 'serve'")


def test_a_port_in_use_is_told_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path / "no folder"), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"attnloom serve: cannot listen on 127.0.0.1, port {port}: Address already in use. Choose "
        "another --port (0: a free one) or --host.\n"
    )


def test_a_port_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tiny", "--port", "65536"]) == 2
    assert "port 65536: bind(): port must be 0-65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--cache-gib", "nan", "nan is no amount of memory; it must be above 0"),
        ("--cache-gib", "-1", "-1 is no amount of memory; it must be above 0"),
        ("--cache-gib", "inf", "inf is no amount of memory; it must be above 0"),
        ("--drain-seconds", "-1", "-1 is no time to wait; it must be a whole number of"),
        ("--drain-seconds", "nan", "nan is no time to wait; it must be a whole number of"),
    ],
)
def test_amounts_that_are_none_ended_in_a_traceback(
    option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--tiny", "--port", "0", option, value])
    assert text in capsys.readouterr().err


def test_a_cache_larger_than_the_memory_ended_in_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--tiny", "--port", "0", "--device", "cpu", "--cache-gib", "1e9"]) == 2
    said = capsys.readouterr().err
    assert "a cache of 1e+09 GiB is larger than the" in said and "Give it less." in said


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_ended_in_a_traceback(
    device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Told before a model is looked for."""
    assert main(["serve", str(tmp_path / "none"), "--port", "0", "--device", device]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"attnloom serve: device is '{device}', which torch cannot use: ")
    assert said.count("\n") == 1


def test_a_length_beyond_the_models_positions_is_not_lowered_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["serve", "--tiny", "--port", "0", "--device", "cpu", "--max-length", "5000"]
    assert main(given) == 2
    assert capsys.readouterr().err == (
        "attnloom serve: max_length is 5000, but the model knows 4096 positions.\n"
    )
    assert build_engine(ServeConfig(device="cpu")).limits.max_length == 4096


def _with_config(folder: Path) -> ServeConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return ServeConfig(folder, "cpu")


def test_a_tokenizer_that_is_missing_or_damaged_is_told_before_weights_are_read(
    tmp_path: Path,
) -> None:
    config = _with_config(tmp_path)  # has no weights either
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        build_engine(config)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: "):
        build_engine(config)
    make_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"holds no \*.safetensors"):
        build_engine(config)


def test_a_damaged_chat_template_is_told_at_the_start(tmp_path: Path) -> None:
    """It was an error 500 of every conversation."""
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\n{% for %}")
    with pytest.raises(ModelError) as caught:
        FolderTokenizer(tmp_path)
    assert str(caught.value).startswith("line 2 of the model's chat template cannot be read: ")


def test_a_chat_template_among_several_is_not_passed_over(tmp_path: Path) -> None:
    """A list of named templates counted as none."""
    make_tokenizer(tmp_path)
    assert not FolderTokenizer(tmp_path).has_template
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "the"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.has_template
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == tokenizer.encode("the")


def test_a_template_that_fails_on_messages_is_their_fault(tmp_path: Path) -> None:
    """It was an error of the server."""
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].picture.width }}")
    with pytest.raises(
        RequestError, match=r"refuses these messages: .* has no attribute 'picture'"
    ):
        FolderTokenizer(tmp_path).chat([{"role": "user", "content": "a"}])


def _stopped_in_a_stream(seconds: float, pauses: Iterable[float]) -> tuple[str, list[str], float]:
    """What a stream says after whose first piece the server is told to stop, as SIGTERM tells it:
    its text, the lines that are no text, and how long it went on.

    Args:
        seconds: to drain. pauses: how long each step of the model takes at least.
    """
    from attnloom.serving.process import StoppableServer
    from attnloom.serving.server import create_app

    engine = make_engine()
    run, waiting = engine._runner.run, iter(pauses)

    def slowly(chunks: Any) -> Any:
        time.sleep(next(waiting))
        return run(chunks)

    engine._runner.run = slowly
    app = create_app(engine, "tiny")
    config = uvicorn.Config(
        app, port=0, log_level="critical", timeout_graceful_shutdown=int(seconds) + 2
    )
    server = StoppableServer(config, app.state.service, seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 20, "stream": True, "temperature": 0}
    text, others, told = "", [], 0.0
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}/v1/completions", timeout=60,
        json={**body, **GREEDY["extra_body"]},
    ) as answer:  # fmt: skip
        for line in answer.iter_lines():
            told = told or time.monotonic()
            server.should_exit = True
            if '"text"' in line:
                text += json.loads(line[6:])["choices"][0]["text"]
            elif line:
                others.append(line)
    took = time.monotonic() - told
    thread.join(20)
    assert not thread.is_alive() and not engine.busy
    return text, others, took


CUT_OFF = [
    'data: {"error":{"message":"the server is shutting down.","type":"server_error","param":null,'
    '"code":"shutting_down"}}',
    "data: [DONE]",
]


def test_a_server_that_is_told_to_stop_finishes_its_streams() -> None:
    text, others, _ = _stopped_in_a_stream(30, repeat(0.01))
    assert (text, others) == (expected("Once", 20), ["data: [DONE]"])


def test_a_server_that_is_told_to_stop_waits_no_longer_than_it_was_told() -> None:
    """It waited for as long as the longest text took, and later broke the stream off."""
    text, others, _ = _stopped_in_a_stream(0.2, repeat(0.2))
    assert others == CUT_OFF and 0 < len(text) < len(expected("Once", 20))


def test_a_stream_that_is_cut_off_does_not_wait_for_a_long_step() -> None:
    _, others, took = _stopped_in_a_stream(0.2, chain([0.0], repeat(3.0)))
    assert others == CUT_OFF and took < 2
