"""The engine against generation one request at a time, without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
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
    OverloadedError,
    Request,
    RequestError,
    SamplingParams,
)
from tests.serving.models import GEMMA, LLAMA, prompt, tiny

MODELS = {"llama": LLAMA, "gemma2": GEMMA}
LIMITS = Limits(max_running=8, max_step_tokens=48, max_waiting=16, max_length=256)


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny(MODELS[request.param])


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return tiny(LLAMA)


def make(model: Decoder, num_pages: int = 64, **rest: Any) -> Engine:
    limits = dataclasses.replace(LIMITS, **rest)
    return Engine(model, ByteTokenizer(), limits, num_pages=num_pages, page_size=16)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def alone(model: Decoder, tokens: list[int], max_tokens: int) -> list[int]:
    """Greedy output, every token computed from the whole text by dense attention."""
    tokens = list(tokens)
    start = len(tokens)

    def attention(layer: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        group = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = layer.scale * torch.einsum("qhd,khd->hqk", query, key)
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        at = torch.arange(len(query))
        distance = at[:, None] - at
        hidden = (distance < 0) | (distance > (layer.window_left or len(query)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

    with torch.no_grad():
        for _ in range(max_tokens):
            at = torch.arange(len(tokens))
            logits = model(torch.tensor(tokens), at, attention, torch.tensor([len(tokens) - 1]))
            tokens.append(int(logits.argmax()))
    return tokens[start:]


def run(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.name, []).extend(output.tokens)
        engine.cache.book.check()
    return found


PROMPTS = [prompt(n, seed=n) for n in (70, 3, 40, 1, 17, 16)]


def test_a_batch_equals_one_at_a_time(model: Decoder) -> None:
    """Requests that come and go at different steps, prompts in chunks beside decoding ones."""
    engine = make(model)
    lengths = [6, 14, 9, 3, 11, 8]
    names, found = [], {}
    for tokens, length in zip(PROMPTS, lengths, strict=True):
        names.append(engine.add(Request(tuple(tokens), greedy(length))))
        for output in engine.step() + engine.step():
            found.setdefault(output.name, []).extend(output.tokens)
    for name, rest in run(engine).items():
        found.setdefault(name, []).extend(rest)
    want = [alone(model, t, n) for t, n in zip(PROMPTS, lengths, strict=True)]
    assert [found[name] for name in names] == want
    assert len({tuple(tokens) for tokens in want}) == len(want)  # the model does tell them apart


def test_chunked_prompts_equal_whole_ones(model: Decoder) -> None:
    tokens = prompt(150, 5)
    outputs = []
    for step_tokens in (256, 48, 7):
        engine = make(model, max_step_tokens=step_tokens)
        outputs.append(engine.generate([tokens], greedy(5)))
        steps = -(-150 // step_tokens) + 4
        assert engine.metrics.steps == steps
    assert outputs[0] == outputs[1] == outputs[2]


def test_shared_beginnings_are_computed_once(llama: Decoder) -> None:
    common = prompt(64, 1)
    prompts = [common + prompt(5, seed) for seed in range(2, 6)]
    want = [alone(llama, tokens, 6) for tokens in prompts]
    engine = make(llama)
    assert engine.generate(prompts[:1], greedy(6)) == want[:1]
    used = engine.cache.num_free_pages
    computed = engine.metrics.computed_tokens
    assert engine.generate(prompts[1:], greedy(6)) == want[1:]
    assert engine.metrics.computed_tokens - computed == 3 * (5 + 5)
    assert engine.metrics.shared_tokens == 3 * 64
    # 64 tokens lie in 4 pages that all four share; nobody filled another page.
    assert engine.cache.num_free_pages == used == 64 - 4
    assert engine.generate(prompts[:1], greedy(6)) == want[:1]


def test_a_prompt_that_is_cached_whole_still_gives_logits(llama: Decoder) -> None:
    tokens = prompt(48, 3)
    engine = make(llama)
    first = engine.generate([tokens], greedy(4))
    assert engine.generate([tokens], greedy(4)) == first
    assert engine.metrics.shared_tokens == 32  # the last page is computed again


def test_running_out_of_pages_loses_nothing(model: Decoder) -> None:
    """16 pages of 16 tokens; six sequences that grow to 100 tokens need 42."""
    prompts = [prompt(40, seed) for seed in range(6)]
    engine = make(model, num_pages=16)
    names = [engine.add(Request(tuple(t), greedy(60))) for t in prompts]
    found = run(engine)
    assert engine.scheduler.num_preemptions > 0
    roomy = make(model, num_pages=64)
    assert [found[name] for name in names] == roomy.generate(prompts, greedy(60))
    assert roomy.scheduler.num_preemptions == 0


def test_pages_of_ended_sequences_are_given_up_when_needed(llama: Decoder) -> None:
    engine = make(llama, num_pages=16)
    for seed in range(6):
        engine.generate([prompt(100, seed)], greedy(2))
    assert engine.cache.num_free_pages < 6
    assert engine.generate([prompt(240, 9)], greedy(10)) == [alone(llama, prompt(240, 9), 10)]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_frees_pages(llama: Decoder, steps: int) -> None:
    engine = make(llama)
    gone = engine.add(Request(tuple(prompt(60)), greedy(50)))
    kept = engine.add(Request(tuple(prompt(20, 1)), greedy(8)))
    found: list[int] = []
    for _ in range(steps):
        found += [t for o in engine.step() if o.name == kept for t in o.tokens]
    assert engine.cancel(gone)
    assert not engine.cancel(gone)
    found += run(engine)[kept]
    assert found == alone(llama, prompt(20, 1), 8)
    while engine.scheduler.prefixes.give_up_one():
        pass
    assert engine.cache.num_free_pages == 64
    assert engine.metrics.finished[Finish.CANCELLED.value] == 1


def test_a_full_queue_refuses(llama: Decoder) -> None:
    engine = make(llama, max_waiting=2, max_running=1)
    for seed in range(2):
        engine.add(Request(tuple(prompt(5, seed)), greedy(2)))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        engine.add(Request(tuple(prompt(5)), greedy(2)))
    assert len(run(engine)) == 2


REFUSED: dict[str, tuple[Callable[[], Request], str]] = {
    "empty": (lambda: Request(()), "the prompt is empty"),
    "long": (lambda: Request((1,) * 250, greedy(7)), "more than the 256 tokens"),
    "unknown token": (lambda: Request((1, 258)), "token 258 is not one of the model's 258"),
    "temperature": (lambda: Request((1,), SamplingParams(temperature=-1)), "temperature is -1"),
    "nan": (lambda: Request((1,), SamplingParams(temperature=float("nan"))), "temperature is nan"),
    "top_p": (lambda: Request((1,), SamplingParams(top_p=0)), "top_p is 0"),
    "max_tokens": (lambda: Request((1,), SamplingParams(max_tokens=0)), "max_tokens is 0"),
    "stop": (lambda: Request((1,), SamplingParams(stop=("",))), "stop holds an empty text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(llama: Decoder, name: str) -> None:
    build, text = REFUSED[name]
    engine = make(llama)
    with pytest.raises(RequestError, match=text):
        engine.add(build())
    assert not engine.busy


def test_seeds_decide_whatever_else_runs(llama: Decoder) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
    first = make(llama).generate([prompt(20)], params)
    engine = make(llama)
    other = [engine.add(Request(tuple(prompt(9, s)), greedy(9))) for s in range(4)]
    name = engine.add(Request(tuple(prompt(20)), params))
    found = run(engine)
    assert [found[name]] == first
    assert len(other) == 4
    other_seed = dataclasses.replace(params, seed=8)
    assert make(llama).generate([prompt(20)], other_seed) != first


def test_the_end_of_a_text(llama: Decoder) -> None:
    """A token of the model's end stops; so does a stop text, which is not part of the output."""
    tokens = alone(llama, PROMPTS[0], 30)
    end = tokens[10]
    first = tokens.index(end)
    config = dataclasses.replace(llama.config, eos_tokens=(end,))
    llama.config, plain = config, llama.config
    try:
        engine = make(llama)
        (found,) = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=30))
        assert found == tokens[: first + 1]
        assert engine.metrics.finished[Finish.STOP.value] == 1
    finally:
        llama.config = plain


def test_a_reserved_name_is_refused(llama: Decoder) -> None:
    engine = make(llama)
    engine.add(Request((1, 2), greedy(2), name="mine"))
    with pytest.raises(RequestError, match="'mine' is being served already"):
        engine.add(Request((1, 2), greedy(2), name="mine"))


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events(model: Decoder, seed: int) -> None:
    """Requests that arrive, leave and share beginnings at random, few pages, guesses good and bad:
    every text that ends is that of the model alone, and at the end no page is lost."""
    random = Random(seed)
    beginnings = [prompt(37, s) for s in range(2)]
    limits = Limits(max_running=4, max_step_tokens=random.choice([9, 40]), max_length=128)
    drafter = NgramDrafter(ngram=1, branches=3, depth=3)
    engine = Engine(model, ByteTokenizer(), limits, num_pages=9, page_size=16, drafter=drafter)
    asked: dict[str, tuple[list[int], int]] = {}
    found: dict[str, list[int]] = {}
    ended: set[str] = set()
    for _ in range(400):
        if len(asked) < 12 and random.random() < 0.15:
            start = random.choice(beginnings)[: random.randrange(1, 38)]
            tokens = start + prompt(random.randrange(20), random.randrange(99))
            length = random.randrange(1, 40)
            asked[engine.add(Request(tuple(tokens), greedy(length)))] = (tokens, length)
        if asked and random.random() < 0.02:
            engine.cancel(random.choice(list(asked)))
        for output in engine.step():
            found.setdefault(output.name, []).extend(output.tokens)
            if output.finish is not None:
                ended.add(output.name)
        engine.cache.book.check()
        if len(asked) == 12 and not engine.busy:
            break
    assert not engine.busy and len(ended) >= 6
    for name in ended:
        assert found[name] == alone(model, *asked[name])
    while engine.scheduler.prefixes.give_up_one():
        pass
    assert engine.cache.num_free_pages == 9 and not engine.cache.sequences


def left_nothing(engine: Engine) -> bool:
    """Whether nobody runs or waits and no page is lost."""
    engine.cache.book.check()
    while engine.scheduler.prefixes.give_up_one():
        pass
    return not engine.busy and not engine.scheduler.waiting and not engine.cache.sequences


def test_generate_takes_more_prompts_than_may_wait(llama: Decoder) -> None:
    """It raised OverloadedError, and left the first ones in the queue."""
    engine = make(llama, max_waiting=2, max_running=2)
    prompts = [prompt(1 + seed % 7, seed) for seed in range(9)]
    most = 0
    add = engine.scheduler.add

    def counting(sequence: Any) -> None:
        nonlocal most
        add(sequence)
        most = max(most, len(engine.scheduler.waiting))

    engine.scheduler.add = counting  # type: ignore[method-assign]
    assert engine.generate(prompts, greedy(5)) == [alone(llama, t, 5) for t in prompts]
    assert most == 2 and engine.metrics.requests == 9 and left_nothing(engine)


def test_generate_waits_behind_a_full_queue(llama: Decoder) -> None:
    engine = make(llama, max_waiting=1, max_running=1)
    other = engine.add(Request(tuple(prompt(9, 1)), greedy(4)))
    assert engine.generate([prompt(5, 2), prompt(6, 3)], greedy(3)) == [
        alone(llama, prompt(5, 2), 3),
        alone(llama, prompt(6, 3), 3),
    ]
    assert not engine.cancel(other) and left_nothing(engine)  # it ended meanwhile


def test_generate_begins_none_if_one_cannot_be_served(llama: Decoder) -> None:
    """Those in front of it stayed in the queue for ever."""
    engine = make(llama, max_waiting=1)
    with pytest.raises(RequestError, match="token 300 is not one of"):
        engine.generate([[1, 2], [3], [300]], greedy(2))
    assert engine.metrics.requests == 0 and not engine.busy


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_generate_cancels_its_requests_alone(
    llama: Decoder, error: type[BaseException]
) -> None:
    """Others go on, with the text that they would have had: the failed step had counted a token
    that the cache did not hold."""
    engine = make(llama, max_waiting=3, max_running=2)
    other = engine.add(Request(tuple(prompt(20, 1)), greedy(12)))
    run_model, calls = engine._runner.run, 0

    def failing(chunks: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = run_model(chunks)
        if calls == 4:
            raise error
        return logits

    before = [token for output in engine.step() for token in output.tokens]
    engine._runner.run = failing  # type: ignore[method-assign]
    add = engine.add
    names: list[str] = []
    engine.add = lambda request: names.append(add(request)) or names[-1]  # type: ignore
    with pytest.raises(error):
        engine.generate([prompt(5, s) for s in range(6)], greedy(3))
    assert 3 <= len(names) < 6 and not any(engine.cancel(name) for name in names)
    assert engine.busy
    heard = before + run(engine)[other]
    assert heard == alone(llama, prompt(20, 1), 12)[:1] + alone(llama, prompt(20, 1), 12)[4:]
    assert left_nothing(engine)


def test_a_step_that_failed_can_be_made_again(model: Decoder) -> None:
    """Sequences had one more token in the cache than were computed, and every later one was
    attended to in a wrong place."""
    engine = make(model, max_step_tokens=30)
    names = [engine.add(Request(tuple(t), greedy(8))) for t in PROMPTS]
    run_model, found = engine._runner.run, dict.fromkeys(names, ())
    for step in range(200):
        fails = step % 3 == 2

        def sometimes(chunks: Any, fails: bool = fails) -> Any:
            logits = run_model(chunks)
            if fails:
                raise MemoryError
            return logits

        engine._runner.run = sometimes  # type: ignore[method-assign]
        try:
            for output in engine.step():
                found[output.name] += output.tokens
        except MemoryError:
            engine.cache.book.check()
        if step == 30:
            break
    engine._runner.run = run_model  # type: ignore[method-assign]
    for name, tokens in run(engine).items():
        found[name] += tuple(tokens)
    assert [list(found[name]) for name in names] == [alone(model, t, 8) for t in PROMPTS]
    assert left_nothing(engine)
