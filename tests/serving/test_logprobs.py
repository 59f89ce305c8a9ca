"""Log-probabilities of tokens: of the engine, and in the forms of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from attnloom.errors import RequestError
from attnloom.serving import (
    ByteTokenizer,
    DraftTree,
    Engine,
    Limits,
    Logprob,
    Output,
    Request,
    SamplingParams,
)
from attnloom.serving.logprobs import LogprobForm
from attnloom.serving.sampling import Draw, sample
from tests.serving.models import tiny

MODEL = tiny()
LIMITS = Limits(max_running=4, max_step_tokens=40, max_waiting=20, max_length=200)
PROMPTS = [tuple(range(first, first + 30 * first)) for first in (1, 2, 3)]


class Guess:
    """What a text says, and something else beside."""

    def __init__(self, texts: list[tuple[int, ...]]) -> None:
        self._texts = texts

    def propose(self, tokens: Any) -> DraftTree | None:
        for text in self._texts:
            if text[: len(tokens)] == tuple(tokens) and len(tokens) + 2 < len(text):
                first, second = text[len(tokens) : len(tokens) + 2]
                return DraftTree((7, first, second, first), (-1, -1, 1, 2))
        return None


def run(params: SamplingParams, **options: Any) -> list[list[Output]]:
    """Outputs of each prompt."""
    engine = Engine(MODEL, None, LIMITS, num_pages=60, page_size=16, **options)
    names = [engine.add(Request(prompt, params)) for prompt in PROMPTS]
    found: dict[str, list[Output]] = {name: [] for name in names}
    while engine.busy:
        for output in engine.step():
            found[output.name].append(output)
    return [*found.values()]


def scored(outputs: list[Output]) -> list[Logprob]:
    return [one for output in outputs for one in output.logprobs or ()]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def assert_near(found: list[float], want: list[float]) -> None:
    assert found == pytest.approx(want, abs=1e-4)


WARM = SamplingParams(temperature=0.8, top_k=50, seed=3, max_tokens=20, ignore_eos=True, logprobs=3)


def test_logprobs_are_those_of_the_whole_text() -> None:
    """Each equals what a prompt of all tokens before it gives its next one."""
    outputs = run(WARM)[1]
    text = list(PROMPTS[1])
    for one in scored(outputs):
        engine = Engine(MODEL, None, LIMITS, num_pages=60, page_size=16)
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
        engine.add(Request(tuple(text), greedy))
        found: list[Output] = []
        while engine.busy:
            found += engine.step()
        (want,) = scored(found)
        assert [t for t, _ in one.top] == [t for t, _ in want.top[:3]] and len(one.top) == 3
        assert_near([v for _, v in one.top], [v for _, v in want.top[:3]])
        assert want.token == want.top[0][0] and want.logprob == want.top[0][1]
        same = [value for token, value in want.top if token == one.token]
        if same:
            assert_near([one.logprob], same)
        text.append(one.token)
    assert len(text) == len(PROMPTS[1]) + 20


@pytest.mark.parametrize("how", ["drafts", "ahead", "alone"])
def test_logprobs_belong_to_the_tokens_that_are_kept(how: str) -> None:
    want = run(WARM)
    texts = [(*p, *tokens_of(o)) for p, o in zip(PROMPTS, want, strict=True)]
    options: dict[str, dict[str, Any]] = {
        "drafts": {"drafter": Guess(texts)},
        "ahead": {"run_ahead": True},
        "alone": {},
    }
    found = run(WARM, **options[how])
    if how == "drafts":
        assert max(len(output.tokens) for output in found[0]) > 2
    for one, other in zip(found, want, strict=True):
        for output in one:
            assert output.logprobs is not None
            assert [p.token for p in output.logprobs] == list(output.tokens)
        assert tokens_of(one) == tokens_of(other)
        assert_near([p.logprob for p in scored(one)], [p.logprob for p in scored(other)])


def test_only_those_who_ask_get_them() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    wishes = [SamplingParams(logprobs=n) for n in (None, 0, 2, None)]
    drawn = sample(logits, [Draw(params, 1, 0) for params in wishes])
    found = drawn.read_logprobs()
    assert found is not None and found[0] is None is found[3]
    assert found[1] is not None and found[1].top == ()
    assert found[2] is not None and len(found[2].top) == 2
    want = logits.log_softmax(-1)
    for row in (1, 2):
        one = found[row]
        assert one is not None and one.token == drawn.read()[row]
        assert_near([one.logprob], [want[row, one.token].item()])
    assert sample(logits, [Draw(SamplingParams(), 1, 0)] * 4).read_logprobs() is None
    for output in run(SamplingParams(max_tokens=2))[0]:
        assert output.logprobs is None


@pytest.mark.parametrize("number", [-1, 21, True, 1.5])
def test_numbers_that_are_none_are_refused(number: Any) -> None:
    with pytest.raises(RequestError, match=r"logprobs is .*; it must be a whole number from 0 to"):
        SamplingParams(logprobs=number)


def test_forms_are_json_whatever_numbers_and_tokens_are() -> None:
    euro = "€".encode()
    found = [
        Logprob(euro[0], -torch.inf, ((euro[0], float("nan")), (euro[1], -3.0))),
        Logprob(ord("a"), -0.5, ((ord("a"), -0.5), (euro[1], -2.0))),
    ]
    decode = ByteTokenizer().decode
    chat = LogprobForm(decode, chat=True).of(0, found)
    assert chat is not None
    assert json.loads(json.dumps(chat, allow_nan=False)) == chat
    first, second = chat["content"]
    assert (first["logprob"], first["bytes"], second["token"]) == (-9999.0, None, "a")
    assert second["bytes"] == [97] and second["top_logprobs"][0]["token"] == "a"
    form = LogprobForm(decode, chat=False)
    columns = form.of(0, found)
    assert columns is not None
    assert json.loads(json.dumps(columns, allow_nan=False)) == columns
    assert columns["top_logprobs"] == [{"\ufffd": -9999.0}, {"a": -0.5, "\ufffd": -2.0}]
    assert columns["text_offset"] == [0, 1]
    again = form.of(0, found[1:])
    assert again is not None and again["text_offset"] == [2]
    assert form.of(0, None) is None


def test_a_decoder_that_drops_the_first_space() -> None:
    words = {1: "\u2581the", 2: "\u2581cat", 3: "s"}
    form = LogprobForm(
        lambda tokens: "".join(words[t] for t in tokens).replace("\u2581", " ").removeprefix(" "),
        chat=False,
    )
    found = form.of(0, [Logprob(token, -1.0, ()) for token in (1, 2, 3)])
    assert found is not None and found["tokens"] == [" the", " cat", "s"]
    assert found["top_logprobs"] is None
