"""Logits of one sequence that are NaN or infinite ended the whole step; greedy hid them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from attnloom.serving import (
    ByteTokenizer,
    Decoder,
    Engine,
    Finish,
    Limits,
    NgramDrafter,
    NotFiniteError,
    Request,
    SamplingParams,
)
from attnloom.serving.sampling import Draw, sample
from attnloom.serving.service import Service, StepFailedError
from tests.serving.models import LLAMA, prompt, tiny

LIMITS = Limits(max_running=4, max_step_tokens=64, max_length=128)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"top_k": 2000, "logprobs": 0},
]
SPOILT = 7  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = tiny(LLAMA)
    with torch.no_grad():
        made.embed_tokens.weight[SPOILT] = torch.nan
    return made


def make(model: Decoder, **options: Any) -> Engine:
    return Engine(model, ByteTokenizer(), LIMITS, num_pages=32, page_size=16, **options)


ROWS = {
    "nan": [torch.nan] * 9,
    "one nan": [1.0, 2.0, torch.nan] + [0.0] * 6,
    "infinite": [0.0, torch.inf] + [1.0] * 7,
    "nothing": [-torch.inf] * 9,
}


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_no_token_beyond_the_vocabulary_is_drawn(name: str, wish: dict[str, Any]) -> None:
    good = torch.randn(9, generator=torch.Generator().manual_seed(0))
    good[3:6] = -torch.inf  # which a model may say of tokens that it never gives
    logits = torch.stack([good, torch.tensor(ROWS[name]), good])
    draws = [Draw(SamplingParams(**wish), 1, 0)] * 3
    drawn = sample(logits, draws)
    assert drawn.read_sound() == [True, False, True]
    assert all(0 <= token < 9 for token in drawn.read())
    assert drawn.read()[::2] == sample(logits[::2], draws[:2]).read()


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_ends_alone(model: Decoder, wish: dict[str, Any], run_ahead: bool) -> None:
    neighbour = prompt(30, seed=1)
    (want,) = make(model).generate([neighbour], GREEDY)
    engine, found = make(model, run_ahead=run_ahead), []
    good = engine.add(Request(tuple(neighbour), GREEDY))
    bad = engine.add(Request((*prompt(40), SPOILT, 2), SamplingParams(max_tokens=9, **wish)))
    ends = []
    while engine.busy:
        for output in engine.step():
            assert output.name == good or output.tokens == ()
            found += output.tokens
            if output.finish is not None:
                ends.append((output.name, output.finish, str(output.error)))
    assert found == want
    assert ends[1] == (good, Finish.LENGTH, "None")
    assert ends[0] == (bad, Finish.ERROR, (
        f"the model's logits after 42 tokens (prompt and output) of {bad!r} are NaN or infinite, "
        "so that no token can be drawn from them. Look for such weights, or for a dtype too narrow "
        "for the model."
    ))  # fmt: skip
    assert engine.metrics.finished == {"error": 1, "length": 1}
    assert engine.scheduler.prefixes.num_kept == 1, "pages of NaN are not kept"
    engine.cache.book.check()


def test_a_token_of_output_may_spoil_a_text(model: Decoder) -> None:
    """Tokens up to it are handed out, with drafts too, and the text that was held back."""
    (want,) = make(model).generate([[1, 2]], GREEDY)
    kept = want[: want.index(want[-1]) + 1]
    weights = model.embed_tokens.weight
    saved = weights[want[-1]].clone()
    try:
        with torch.no_grad():
            weights[want[-1]] = torch.nan
        for drafter in (None, NgramDrafter()):
            engine = make(model, drafter=drafter)
            longer = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
            engine.add(Request((1, 2), longer))
            outputs = [output for _ in range(60) for output in engine.step()]
            assert [token for output in outputs for token in output.tokens] == kept
            assert outputs[-1].finish is Finish.ERROR and outputs[-1].num_output == len(kept)
    finally:
        with torch.no_grad():
            weights[want[-1]] = saved


def test_generate_raises_and_cancels_the_others(model: Decoder) -> None:
    engine = make(model)
    with pytest.raises(NotFiniteError, match="after 1 token "):
        engine.generate([[1, 2], [SPOILT], [3]], GREEDY)
    assert not engine.busy
    assert len(engine.generate([[1, 2]], GREEDY)[0]) == 12


def test_a_service_fails_one_caller(model: Decoder) -> None:
    service = Service(make(model))
    good, bad = Request((1, 2), GREEDY), Request((3, SPOILT), GREEDY)

    async def tokens(*requests: Request) -> list[int]:
        return [
            token async for output in await service.submit(*requests) for token in output.tokens
        ]

    async def both() -> list[Any]:
        return await asyncio.gather(
            tokens(good), tokens(Request((4,), GREEDY), bad), return_exceptions=True
        )

    try:
        found, error = asyncio.run(both())
        assert len(found) == 12
        assert isinstance(error, StepFailedError) and "are NaN or infinite" in str(error)
        assert service.engine.metrics.failed_steps == 0
        assert not service.engine.busy, "other texts of the same request are cancelled"
    finally:
        service.close()


def test_an_endpoint_says_so(model: Decoder) -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from starlette.testclient import TestClient

    from attnloom.serving.server import create_app

    body = {"model": "m", "prompt": [SPOILT], "temperature": 0, "logprobs": 1, "n": 2}
    with TestClient(create_app(make(model), "m")) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error" and "are NaN or infinite" in error["message"]
        lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        assert json.loads(lines[0][6:])["error"]["message"].startswith("the model's logits")
        assert lines[1] == "data: [DONE]"
        assert 'attnloom_finished_total{reason="error"}' in client.get("/metrics").text
