"""Speculation: whatever is drafted, the text is that of the model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from attnloom import compile_stats
from attnloom.serving import (
    ByteTokenizer,
    Decoder,
    DraftTree,
    Engine,
    Limits,
    NgramDrafter,
    Request,
    SamplingParams,
)
from attnloom.serving.drafts import grow
from tests.serving.models import GEMMA, LLAMA, prompt, tiny

LIMITS = Limits(max_running=4, max_step_tokens=64, max_length=256)


class Oracle:
    """Drafts the truth on one branch among wrong ones, up to a point of its own."""

    def __init__(self, truth: dict[int, list[int]], seed: int) -> None:
        self.truth, self.random = truth, random.Random(seed)

    def propose(self, tokens: Sequence[int]) -> DraftTree | None:
        text = self.truth[tokens[0]]
        right = text[len(tokens) : len(tokens) + self.random.randint(0, 5)]
        paths = [[self.random.randrange(256) for _ in range(3)] for _ in range(2)]
        if right:
            cut = self.random.randrange(len(right))
            paths += [right, [*right[:cut], (right[cut] + 1) % 256, 5]]
        self.random.shuffle(paths)
        return grow(paths) if self.random.random() < 0.9 else None


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny({"llama": LLAMA, "gemma2": GEMMA}[request.param])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verified_drafts_change_nothing(model: Decoder, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [[i, *prompt(20 + 13 * i, i)] for i in range(3)]
    plain = Engine(model, None, LIMITS, num_pages=32, page_size=16)
    want = plain.generate(prompts, params)
    truth = {p[0]: p + w for p, w in zip(prompts, want, strict=True)}
    drafted = Engine(model, None, LIMITS, num_pages=32, page_size=16, drafter=Oracle(truth, 1))
    assert drafted.generate(prompts, params) == want
    drafted.cache.book.check()
    counted = drafted.metrics
    assert counted.accepted_tokens > 30
    assert counted.drafted_tokens > 2 * counted.accepted_tokens
    assert counted.steps < 0.7 * plain.metrics.steps
    # What was kept of the ended sequences is right: another text goes on from it.
    more = [p + w[:30] for p, w in zip(prompts, want, strict=True)]
    rest = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    shared = drafted.metrics.shared_tokens
    fresh = Engine(model, None, LIMITS, num_pages=32, page_size=16).generate(more, rest)
    drafted._drafter = None
    assert drafted.generate(more, rest) == fresh
    assert drafted.metrics.shared_tokens - shared > 100


def test_a_new_tree_is_not_traced_again(model: Decoder) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    start = [7, *prompt(30)]
    (want,) = Engine(model, None, LIMITS, num_pages=32, page_size=16).generate([start], params)
    counts = []
    for seed in (4, 5):
        oracle = Oracle({7: start + want}, seed)
        engine = Engine(model, None, LIMITS, num_pages=32, page_size=16, drafter=oracle)
        assert engine.generate([start], params) == [want]
        counts.append(compile_stats().traces)
    assert counts[0] == counts[1]


def test_speculation_when_pages_run_out(model: Decoder) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[i, *prompt(40, i)] for i in range(4)]
    want = Engine(model, None, LIMITS, num_pages=64, page_size=16).generate(prompts, params)
    truth = {p[0]: p + w for p, w in zip(prompts, want, strict=True)}
    engine = Engine(model, None, LIMITS, num_pages=16, page_size=16, drafter=Oracle(truth, 2))
    assert engine.generate(prompts, params) == want
    assert engine.scheduler.num_preemptions > 0


def test_a_text_that_ends_within_a_draft(model: Decoder) -> None:
    engine = Engine(model, ByteTokenizer(), LIMITS, num_pages=32, page_size=16)
    start = [7, *prompt(30)]
    (want,) = engine.generate([start], SamplingParams(temperature=0, max_tokens=40))
    truth = {7: start + want + [1] * 8}
    for length in range(1, 12):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        drafted = Engine(
            model, ByteTokenizer(), LIMITS, num_pages=32, page_size=16, drafter=Oracle(truth, 3)
        )
        assert drafted.generate([start], params) == [want[:length]]


def test_ngrams() -> None:
    drafter = NgramDrafter(ngram=2, branches=2, depth=3)
    tree = drafter.propose([1, 2, 3, 4, 5, 1, 2, 3, 9, 9, 1, 2])
    assert tree == DraftTree((3, 9, 9, 4, 5), (-1, 0, 1, 0, 3))
    assert tree.depths() == [1, 2, 3, 2, 3]
    assert tree.child(0, 4) == 3 and tree.child(-1, 4) is None
    assert tree.cut(4, 2) == DraftTree((3, 9, 4), (-1, 0, 0))
    assert tree.cut(0, 3) is None
    assert drafter.propose([1, 2, 3]) is None


def test_ngrams_speed_up_repetition(model: Decoder) -> None:
    """Greedy texts of a small model soon repeat themselves."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    plain = Engine(model, None, LIMITS, num_pages=32, page_size=16)
    want = plain.generate([prompt(10)], params)
    engine = Engine(model, None, LIMITS, num_pages=32, page_size=16, drafter=NgramDrafter())
    assert engine.generate([prompt(10)], params) == want
    assert engine.metrics.steps < plain.metrics.steps


def test_requests_with_and_without_drafts_share_a_step(model: Decoder) -> None:
    """One decodes with drafts, one without, one is still reading its prompt."""

    class Some:
        def propose(self, tokens: Sequence[int]) -> DraftTree | None:
            return DraftTree((1, 2, 3), (-1, 0, -1)) if tokens[0] == 7 else None

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[7, *prompt(5)], [8, *prompt(9)], [9, *prompt(120)]]
    want = Engine(model, None, LIMITS, num_pages=32, page_size=16).generate(prompts, params)
    engine = Engine(model, None, LIMITS, num_pages=32, page_size=16, drafter=Some())
    names = [engine.add(Request(tuple(p), params)) for p in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.busy:
        for output in engine.step():
            found[output.name] += output.tokens
    assert [found[name] for name in names] == want


class Wrong:
    """A drafter with a mistake."""

    def __init__(self, propose: Callable[[], Any]) -> None:
        self.wrong = propose

    def propose(self, tokens: Sequence[int]) -> DraftTree | None:
        return self.wrong()


MISTAKES: dict[str, Callable[[], Any]] = {
    "token beyond the vocabulary": lambda: DraftTree((10**6,), (-1,)),
    "token below 0": lambda: DraftTree((-1,), (-1,)),
    "child before its parent": lambda: DraftTree((1, 2), (1, -1)),
    "parent that is none": lambda: DraftTree((1,), (5,)),
    "unequal lengths": lambda: DraftTree((1, 2), (-1,)),
    "list": lambda: [1, 2],
    "exception": lambda: 1 // 0,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_drafter_left_the_engine_busy_forever(name: str) -> None:
    model, params = tiny(LLAMA), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    given = prompt(9, 0)
    want = Engine(model, None, LIMITS, num_pages=32, page_size=16).generate([given], params)
    drafter = Wrong(MISTAKES[name])
    engine = Engine(model, None, LIMITS, num_pages=32, page_size=16, drafter=drafter)
    with pytest.warns(UserWarning, match="a draft of Wrong is dropped"):
        assert engine.generate([given], params) == want
    assert not engine.busy


def appending(tokens: Any) -> None:
    tokens.append(5)


def turning(tokens: Any) -> None:
    tokens[-1] = 7


def growing(tokens: Any) -> None:
    tokens.extend([999] * 300)


@pytest.mark.parametrize("change", [appending, turning, growing])
def test_a_drafter_was_handed_the_tokens_of_the_engine(change: Callable[[Any], None]) -> None:
    """What it did to them became the text."""

    class Changing:
        def propose(self, tokens: Sequence[int]) -> DraftTree:
            with contextlib.suppress(AttributeError, TypeError):
                change(tokens)
            return DraftTree((tokens[-1],), (-1,))

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain, drafted = (
        Engine(tiny(LLAMA), None, LIMITS, num_pages=16, page_size=16, drafter=drafter)
        for drafter in (None, Changing())
    )
    assert drafted.generate([[1, 2, 3]], params) == plain.generate([[1, 2, 3]], params)
