"""An engine that two threads stepped went wrong for good, in silence; so did one without room."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from attnloom.errors import OutOfPagesError
from attnloom.serving import (
    Decoder,
    DraftTree,
    Engine,
    Limits,
    OverlapError,
    Request,
    SamplingParams,
)
from tests.serving.models import prompt, tiny

LIMITS = Limits(max_running=4, max_step_tokens=64, max_length=128)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [prompt(20, seed=i) for i in range(3)]


class Meanwhile(Decoder):
    """A decoder that does something else in the midst of its first step."""

    act: Callable[[], object] | None = None

    def forward(self, *args: Any, **options: Any) -> Tensor:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().forward(*args, **options)


def make(**options: Any) -> Engine:
    model = tiny()
    model.__class__ = Meanwhile
    return Engine(model, None, LIMITS, num_pages=32, page_size=16, **options)


CALLS: dict[str, Callable[[Engine], object]] = {
    "step": lambda engine: engine.step(),
    "generate": lambda engine: engine.generate([[1, 2]], GREEDY),
    "warm_up": lambda engine: engine.warm_up(),
}


@pytest.mark.parametrize("elsewhere", [True, False], ids=["another thread", "the same"])
@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", ["step", "generate"])
def test_an_overlapping_call_is_refused(first: str, second: str, elsewhere: bool) -> None:
    wanted = make().generate(PROMPTS, GREEDY)
    engine, errors = make(), []

    def overlap() -> None:
        try:
            CALLS[second](engine)
        except OverlapError as error:
            errors.append(str(error))

    def act() -> None:
        if elsewhere:
            other = threading.Thread(target=overlap, name="other")
            other.start()
            other.join()
        else:
            overlap()

    engine._runner.model.act = act  # type: ignore[assignment]
    if first == "generate":
        assert engine.generate(PROMPTS, GREEDY) == wanted
    else:
        names = [engine.add(Request(tuple(p), GREEDY)) for p in PROMPTS]
        found: dict[str, list[int]] = {name: [] for name in names}
        while engine.busy:
            for output in engine.step():
                found[output.name] += output.tokens
        assert [*found.values()] == wanted
    here = "other" if elsewhere else "MainThread"
    assert errors == [
        f"{second} was called in thread '{here}' while {first} (thread 'MainThread') of the same "
        "engine runs; an engine takes one step at a time. Call step, generate and warm_up in one "
        "thread, or make an engine for each."
    ]
    assert not engine.busy, "a generate that is refused has begun nothing"
    engine.cache.book.check()


def test_steps_in_turn_of_two_threads_are_no_overlap() -> None:
    wanted, engine = make().generate(PROMPTS, GREEDY), make()
    other = threading.Thread(target=lambda: engine.generate(PROMPTS[:1], GREEDY))
    other.start()
    other.join()
    assert engine.generate(PROMPTS, GREEDY) == wanted


def test_an_error_ends_the_turn() -> None:
    engine = make()

    def fail() -> None:
        raise RuntimeError("of the model")

    engine._runner.model.act = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="of the model"):
        engine.generate(PROMPTS, GREEDY)
    assert [*map(len, engine.generate(PROMPTS, GREEDY))] == [12] * 3


def test_a_drafter_that_steps_loses_its_draft_alone() -> None:
    wanted = make().generate(PROMPTS, GREEDY)

    class Steps:
        def propose(self, tokens: object) -> DraftTree | None:
            engine.step()
            return None

    engine = make(drafter=Steps())
    with pytest.warns(UserWarning, match="is dropped: OverlapError: step was called in thread"):
        assert engine.generate(PROMPTS, GREEDY) == wanted


def test_a_step_without_room_says_so() -> None:
    """Sequences of others in the engine's cache made it take empty steps for ever."""
    wanted, engine = make().generate(PROMPTS, GREEDY), make()
    foreign = engine.cache.new()
    engine.cache.extend([foreign], [31 * 16])
    engine.add(Request(tuple(PROMPTS[0]), GREEDY, "mine"))
    said = (
        "request 'mine' finds no room though nothing runs: 1 page is free of 32, others are held "
        "by sequences of the engine's cache that are not its own. Free those, or cancel the "
        "request."
    )
    for _ in range(2):
        with pytest.raises(OutOfPagesError, match=f"^{re.escape(said)}$"):
            engine.step()
    engine.cache.free(foreign)
    found = []
    while engine.busy:
        found += [token for output in engine.step() for token in output.tokens]
    assert found == wanted[0]
