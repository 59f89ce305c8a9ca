"""Steps that are started before the tokens of the last one are read."""

from __future__ import annotations

from random import Random

import pytest

from attnloom.serving import Decoder, Engine, Limits, Request, SamplingParams
from tests.serving.models import GEMMA, LLAMA, prompt, tiny
from tests.serving.test_static import Guesses, make

LIMITS = Limits(max_running=4, max_step_tokens=40, max_length=160)


@pytest.fixture(scope="module", params=[LLAMA, GEMMA], ids=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny(request.param)


def engine_of(model: Decoder, run_ahead: bool, num_pages: int = 24) -> Engine:
    engine = Engine(model, None, LIMITS, num_pages=num_pages, page_size=16, run_ahead=run_ahead)
    launched = engine._launch
    engine.num_ahead = 0  # pyright: ignore

    def count(chunks, after=None):
        engine.num_ahead += after is not None  # pyright: ignore
        return launched(chunks, after)

    engine._launch = count
    return engine


def texts(engine: Engine, eos: int | None, temperature: float, seed: int) -> dict[str, list[int]]:
    """Requests that come at any time, some cancelled; eos: a token that ends a text."""
    random = Random(seed)
    if eos is not None:
        engine._eos = {eos}
    found: dict[str, list[int]] = {}
    asked = 0
    for _ in range(400):
        if asked < 9 and random.random() < 0.2:
            params = SamplingParams(
                temperature=temperature * (asked % 2),
                seed=asked,
                max_tokens=random.randrange(1, 40),
                ignore_eos=eos is None,
            )
            tokens = (asked, *prompt(random.randrange(1, 50), asked))
            engine.add(Request(tokens, params, f"{asked}"))
            asked += 1
        for output in engine.step():
            found.setdefault(output.name, []).extend(output.tokens)
        engine.cache.book.check()
        if asked == 9 and not engine.busy:
            break
    assert not engine.busy
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_stay_the_same(model: Decoder, temperature: float) -> None:
    """Texts that end at a length, or at a token that nobody foresaw; drawn by seed as well."""
    plain = texts(engine_of(model, False), None, temperature, 1)
    for eos in (None, plain["2"][len(plain["2"]) // 2]):
        want = texts(engine_of(model, False), eos, temperature, 1)
        engine = engine_of(model, True)
        assert texts(engine, eos, temperature, 1) == want
        assert engine.num_ahead > 10  # pyright: ignore


def test_few_pages(model: Decoder) -> None:
    """Nobody gives way to a step that is started ahead, and the same sequences give way later."""
    want = texts(engine_of(model, False), None, 0.0, 2)
    engine = engine_of(model, True, num_pages=11)
    assert texts(engine, None, 0.0, 2) == want
    assert engine.scheduler.num_preemptions > 0


def test_cancelled_while_a_step_is_under_way(model: Decoder) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (want,) = engine_of(model, False).generate([prompt(20)], params)
    engine = engine_of(model, True)
    engine.add(Request(tuple(prompt(20)), params, "stays"))
    engine.add(Request(tuple(prompt(9, 1)), params, "goes"))
    found = []
    for i in range(60):
        if i == 7:
            assert engine._launched is not None
            assert engine.cancel("goes")
        for output in engine.step():
            assert i < 7 or output.name == "stays"
            found += output.tokens if output.name == "stays" else ()
    assert found == want
    engine.add(Request(tuple(prompt(20)), params, "last"))
    for _ in range(4):
        engine.step()
    assert engine._launched is not None and engine.cancel("last")
    assert not engine.busy
    assert engine.generate([prompt(20)], params) == [want]


def test_a_step_that_fails_is_computed_anew(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (want,) = engine_of(model, False).generate([prompt(20)], params)
    engine = engine_of(model, True)
    engine.add(Request(tuple(prompt(20)), params))
    found = [t for _ in range(5) for o in engine.step() for t in o.tokens]
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "follow", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.busy:
        found += [t for o in engine.step() for t in o.tokens]
    assert found == want


def test_drafts_follow_from_tokens(model: Decoder) -> None:
    assert not make(model, "padded", drafter=Guesses([]), run_ahead=True)._runs_ahead


@pytest.mark.gpu
def test_texts_on_a_device() -> None:
    """Graphs that are started before the host has read what the last one gave."""
    for given in (LLAMA, GEMMA):
        model = tiny({**given, "head_dim": 64}).to("cuda")
        for temperature in (0.0, 0.7):
            plain = texts(engine_of(model, False), None, temperature, 1)
            for eos in (None, plain["2"][len(plain["2"]) // 2]):
                want = texts(engine_of(model, False), eos, temperature, 1)
                engine = engine_of(model, True)
                assert texts(engine, eos, temperature, 1) == want
                assert engine.num_ahead > 10  # pyright: ignore
