"""Times of single calls: a median, and the calls that stand out."""

import gc
import time

import pytest

from benchmarks.gpu_host import in_turn, timed_calls


def test_a_hiccup_in_one_call_is_no_mean_of_all():
    # 500 causal calls of 30 us and one of 340 ms were a row of 707 us
    places = iter(range(50))

    def call() -> None:
        time.sleep(0.2 if next(places) == 20 else 0.001)

    calls = timed_calls(call, 50)
    assert calls.sample.median_ms < 20
    assert sum(calls.times_ms) / 50 > 4
    (told,) = [line for line in calls.hiccups if line.startswith("call 20 ")]
    assert "0.00 of them to collect garbage" in told


def test_collections_of_garbage_are_told_apart():
    places = iter(range(10))

    def call() -> None:
        if next(places) == 4:
            gc.collect()

    before = list(gc.callbacks)
    calls = timed_calls(call, 10)
    assert set(calls.collecting_ms) == {4}
    assert calls.collecting_ms[4] == pytest.approx(calls.times_ms[4], rel=0.5)
    assert gc.callbacks == before


def test_the_collector_is_let_go_after_an_error():
    before = list(gc.callbacks)
    with pytest.raises(ZeroDivisionError):
        timed_calls(lambda: 1 / 0, 3)
    assert gc.callbacks == before


def test_a_slow_second_of_the_machine_falls_on_all_alike():
    # causal 57 us and full 26, measured one after the other, were 28 and 26 in turn
    slow = iter([True] * 120)

    def call() -> None:
        time.sleep(0.004 if next(slow, False) else 0.001)

    found = in_turn({"full": call, "causal": call})
    medians = [calls.sample.median_ms for calls in found.values()]
    assert max(medians) < 3.0
    assert [len(calls.times_ms) for calls in found.values()] == [500, 500]


def test_collections_keep_their_calls_over_turns():
    calls = iter(range(10_000))

    def collects_late() -> None:
        if next(calls) == 30:  # the fourth call timed in the second turn
            gc.collect()

    found = in_turn({"x": collects_late})["x"]
    assert 28 in found.collecting_ms
