"""Several texts for one request: lists of prompts, and n texts a prompt."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from attnloom.serving import OverloadedError, Request, SamplingParams
from attnloom.serving.service import Service
from tests.serving.endpoint import GREEDY, LIMITS, Running, expected, make_engine

pytest.importorskip("openai", reason="needs the extra 'dev'")


def test_a_list_of_prompts_gives_a_choice_for_each(running: Running) -> None:
    """It was refused as no valid string."""
    prompts = ["Once", "x" * 20, "Twice"]
    answer = running.client().completions.create(prompt=prompts, max_tokens=12, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [expected(p, 12) for p in prompts]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 + 21 + 6, 36)
    tokens = [[256, *p.encode()] for p in prompts]
    again = running.client().completions.create(prompt=tokens, max_tokens=12, **GREEDY)
    assert [choice.text for choice in again.choices] == [c.text for c in answer.choices]


def _texts(pieces: Any, count: int) -> list[str]:
    texts = [""] * count
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += getattr(choice, "text", "") or choice.delta.content or ""
    return texts


def test_n_texts_are_those_of_seeds_that_follow(running: Running) -> None:
    """n=2 was told that its input should be 1."""
    client = running.client()
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 12}
    singles = [client.completions.create(seed=s, **asked).choices[0].text for s in (7, 8)]
    answer = client.completions.create(seed=7, n=2, **asked)
    assert [choice.text for choice in answer.choices] == singles
    assert len({*singles}) == 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)
    pieces = list(client.completions.create(seed=7, n=2, stream=True, **asked))
    assert [p.choices[0].finish_reason for p in pieces].count("length") == 2
    texts = ["", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == singles


def test_n_answers_of_a_chat_stream_side_by_side(running: Running) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "n": 3,
    }
    client = running.client()
    whole = client.chat.completions.create(seed=1, model="tiny", **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    *pieces, last = client.chat.completions.create(
        seed=1, model="tiny", stream=True, stream_options={"include_usage": True}, **asked
    )
    assert _texts(pieces, 3) == [choice.message.content for choice in whole.choices]
    roles = [p.choices[0].index for p in pieces if p.choices[0].delta.role == "assistant"]
    assert sorted(roles) == [0, 1, 2]
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_model_can_be_looked_up(running: Running) -> None:
    """`models.retrieve` was 404, and nothing said how long a text may be."""
    openai = pytest.importorskip("openai")
    client = running.client()
    found = client.models.retrieve("tiny")
    assert found == client.models.list().data[0]
    assert found.model_dump()["max_model_len"] == 400
    with pytest.raises(openai.NotFoundError, match="no model 'org/other'"):
        client.models.retrieve("org/other")


ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def _requests(count: int) -> list[Request]:
    return [Request((1,), ONE) for _ in range(count)]


def test_a_batch_waits_whole_or_not_at_all() -> None:
    engine = make_engine()
    service = Service(engine)

    async def ask(count: int) -> list[str]:
        return [output.name async for output in await service.submit(*_requests(count))]

    try:
        assert len(asyncio.run(ask(LIMITS.max_waiting))) == LIMITS.max_waiting
        engine.scheduler.waiting.append(None)  # type: ignore[arg-type]
        with pytest.raises(OverloadedError) as caught:
            asyncio.run(ask(4))
        assert str(caught.value) == (
            "1 request is waiting, and 4 more at once do not fit into the 4 allowed; try again "
            "later."
        )
        assert engine.metrics.requests == LIMITS.max_waiting
    finally:
        engine.scheduler.waiting.clear()
        service.close()


def test_outputs_that_nobody_began_to_read_are_cancelled() -> None:
    """A client that left before its stream began was served to the end."""
    engine = make_engine()
    service = Service(engine)
    long = SamplingParams(max_tokens=300, ignore_eos=True)

    async def leave() -> None:
        outputs = await service.submit(Request((1,), long), Request((2,), long))
        await outputs.aclose()

    try:
        asyncio.run(leave())
        end = time.monotonic() + 20
        while engine.busy:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert engine.metrics.finished["cancelled"] == 2
    finally:
        service.close()
