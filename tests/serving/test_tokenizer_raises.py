"""A tokenizer that raised for one request lost tokens of the others, or starved them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from attnloom.serving import (
    ByteTokenizer,
    Decoder,
    Engine,
    Finish,
    Limits,
    NgramDrafter,
    Output,
    Request,
    SamplingParams,
)
from attnloom.serving.service import Service, StepFailedError
from attnloom.serving.text import TextStream
from tests.serving.models import prompt, tiny

LIMITS = Limits(max_running=4, max_step_tokens=64, max_length=128)
WARM = [SamplingParams(temperature=3, seed=i, max_tokens=10, ignore_eos=True) for i in range(3)]
PROMPTS = [tuple(prompt(20, seed=i)) for i in range(3)]
ALWAYS = 10**9
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"run_ahead": True},
    "drafts": {"drafter": NgramDrafter()},
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny()


class Failing(ByteTokenizer):
    """Acts, in place of decoding, the first few times that a token is among those to decode."""

    def __init__(self, token: int, act: Callable[[], Any], times: int = ALWAYS) -> None:
        self.token, self.act, self.times = token, act, times

    def decode(self, tokens: Sequence[int]) -> str:
        if self.token in tokens and self.times > 0:
            self.times -= 1
            return self.act()
        return super().decode(tokens)


def boom() -> str:
    raise ValueError("boom")


def make(model: Decoder, tokenizer: ByteTokenizer, **options: Any) -> Engine:
    return Engine(model, tokenizer, LIMITS, num_pages=40, page_size=16, **options)


def alone(model: Decoder) -> list[list[int]]:
    engine = make(model, ByteTokenizer())
    return [engine.generate([p], wish)[0] for p, wish in zip(PROMPTS, WARM, strict=True)]


def own_place(wanted: list[list[int]]) -> int:
    """Place of the last token of request 1 that is in no other text, nor before it."""
    others = {*wanted[0], *wanted[2]}
    return max(at for at, token in enumerate(wanted[1]) if token not in {*others, *wanted[1][:at]})


def serve(engine: Engine) -> list[list[Output]]:
    names = [engine.add(Request(p, wish)) for p, wish in zip(PROMPTS, WARM, strict=True)]
    found: list[list[Output]] = [[] for _ in names]
    for _ in range(40):
        for output in engine.step():
            found[names.index(output.name)].append(output)
    assert not engine.busy
    return found


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("times", [1, ALWAYS])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_request_ends_alone(model: Decoder, kind: str, times: int) -> None:
    wanted = alone(model)
    place = own_place(wanted)
    engine = make(model, Failing(wanted[1][place], boom, times), **OPTIONS[kind])
    found = serve(engine)
    assert [tokens(found[i]) for i in (0, 2)] == [wanted[0], wanted[2]]
    assert [found[i][-1].finish for i in (0, 2)] == [Finish.LENGTH] * 2
    for i in (0, 2):
        text = "".join(output.text for output in found[i])
        assert text == ByteTokenizer().decode(wanted[i])
    last = found[1][-1]
    assert last.finish is Finish.ERROR and repr(last.error) == "ValueError('boom')"
    assert tokens(found[1]) == wanted[1][: place + 1] and last.num_output == place + 1
    assert engine.metrics.finished == {"error": 1, "length": 2}
    assert engine.metrics.output_tokens == 20 + place + 1
    engine.cache.book.check()


@pytest.mark.parametrize("value", [None, b"bytes", 3])
def test_a_tokenizer_that_gives_no_text(model: Decoder, value: Any) -> None:
    wanted = alone(model)
    engine = make(model, Failing(wanted[1][own_place(wanted)], lambda: value))
    found = serve(engine)
    assert found[1][-1].finish is Finish.ERROR and found[1][-1].error is not None
    assert [tokens(found[i]) for i in (0, 2)] == [wanted[0], wanted[2]]


@pytest.mark.parametrize("kind", OPTIONS)
def test_outputs_of_an_interrupted_step_come_with_the_next(model: Decoder, kind: str) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    wanted = alone(model)
    engine = make(model, Failing(wanted[1][own_place(wanted)], interrupt, 3), **OPTIONS[kind])
    names = [engine.add(Request(p, wish)) for p, wish in zip(PROMPTS, WARM, strict=True)]
    found: list[list[Output]] = [[] for _ in names]
    interrupts = 0
    while engine.busy:
        try:
            for output in engine.step():
                found[names.index(output.name)].append(output)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert [*map(tokens, found)] == wanted
    for outputs, want in zip(found, wanted, strict=True):
        assert "".join(output.text for output in outputs) == ByteTokenizer().decode(want)
        assert sum(len(output.tokens) for output in outputs) == outputs[-1].num_output


def test_outputs_that_nobody_wants_any_more_do_not_come(model: Decoder) -> None:
    wanted = alone(model)

    def interrupt() -> str:
        raise KeyboardInterrupt

    engine = make(model, Failing(wanted[1][0], interrupt, 1))
    names = [engine.add(Request(p, wish)) for p, wish in zip(PROMPTS, WARM, strict=True)]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine._ready and engine.cancel(names[0])
    while engine.busy:
        assert all(output.name != names[0] for output in engine.step())


def test_a_tokenizer_that_cancels(model: Decoder) -> None:
    """Its own request, and one that comes later in the same step."""
    wanted = alone(model)
    tokenizer = Failing(wanted[1][own_place(wanted)], boom, 1)
    engine = make(model, tokenizer)
    names: list[str] = []
    tokenizer.act = lambda: str([engine.cancel(name) for name in names[1:]])
    names += [engine.add(Request(p, wish)) for p, wish in zip(PROMPTS, WARM, strict=True)]
    found = []
    while engine.busy:
        found += [t for output in engine.step() if output.name == names[0] for t in output.tokens]
    assert found == wanted[0]
    assert engine.metrics.finished == {"cancelled": 2, "length": 1}


def test_generate_raises_what_the_tokenizer_raised(model: Decoder) -> None:
    wanted = alone(model)
    engine = make(model, Failing(wanted[1][0], boom))
    with pytest.raises(ValueError, match="boom"):
        engine.generate([PROMPTS[1]], WARM[1])
    assert not engine.busy


def test_text_that_is_held_back_comes_with_the_error() -> None:
    stream = TextStream(Failing(ord("!"), boom), ("the end",))
    text = "".join(map(stream.add, b"so the "))
    with pytest.raises(ValueError, match="boom"):
        stream.add(ord("!"))
    assert text + stream.held == "so the "


def test_a_service_fails_one_caller(model: Decoder) -> None:
    wanted = alone(model)
    service = Service(make(model, Failing(wanted[1][own_place(wanted)], boom)))

    async def ask(i: int) -> list[int]:
        outputs = await service.submit(Request(PROMPTS[i], WARM[i]))
        return [token async for output in outputs for token in output.tokens]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(ask, range(3)), return_exceptions=True)

    try:
        found = asyncio.run(all_of_them())
    finally:
        service.close()
    assert [found[0], found[2]] == [wanted[0], wanted[2]]
    assert isinstance(found[1], StepFailedError)
    assert str(found[1]) == "the tokenizer failed: ValueError."
    assert service.engine.metrics.failed_steps == 0


def test_an_endpoint_tells_that_caller_alone(model: Decoder) -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from starlette.testclient import TestClient

    from attnloom.serving.server import create_app

    def body(i: int, **more: Any) -> dict[str, Any]:
        asked = {"model": "m", "prompt": [*PROMPTS[i]], "max_tokens": 10, "ignore_eos": True}
        return asked | {"temperature": 2, "seed": i} | more

    warm = [SamplingParams(temperature=2, seed=i, max_tokens=10, ignore_eos=True) for i in (0, 1)]
    engine = make(model, ByteTokenizer())
    good, bad = (engine.generate([PROMPTS[i]], warm[i])[0] for i in (0, 1))
    token = next(token for token in bad if token not in good)
    app = create_app(make(model, Failing(token, boom)), "m")
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/v1/completions", json=body(1))
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the tokenizer failed: ValueError."
        events = client.post("/v1/completions", json=body(1, stream=True)).text.split("\n\n")
        assert json.loads(events[-3][6:])["error"]["message"].startswith("the tokenizer failed")
        assert events[-2] == "data: [DONE]"
        fine = client.post("/v1/completions", json=body(0))
        assert fine.json()["choices"][0]["text"] == ByteTokenizer().decode(good)
        assert "attnloom_failed_steps_total 0" in client.get("/metrics").text


def test_a_stream_whose_log_probabilities_cannot_be_spelled_ends_with_an_error(
    model: Decoder,
) -> None:
    """It broke off, as an exception of the server."""
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from starlette.testclient import TestClient

    from attnloom.serving.server import create_app

    class Twice(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            if len(tokens) == 2 and tokens[0] == tokens[1]:  # as log-probabilities ask
                raise ValueError("boom")
            return super().decode(tokens)

    params = {"temperature": 2, "seed": 0, "max_tokens": 3, "logprobs": 0, "stream": True}
    asked = {"model": "m", "prompt": [*PROMPTS[0]], **params}
    with TestClient(create_app(make(model, Twice()), "m")) as client:
        events = client.post("/v1/completions", json=asked).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["message"] == "the server failed: ValueError."
    assert events[-2] == "data: [DONE]"
