"""Alternating repeats in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_TURNS, MAX_TURNS = 4, 20
RUNS_A_TURN = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of repeated runs: median, 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    num_runs: int


def alternate(runs: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, Sample]:
    """Time callables in turn, so that drift of the machine meets all of them alike.

    A turn is one call that does not count and RUNS_A_TURN that do: the first pays for what the
    contender before it left behind, evicted caches and memory given back to the system, which after
    a dense one costs a fast kernel half of its time.

    Args:
        runs: each is called twice before anything counts.
        budget_s: aim at this much time in all; at least MIN_TURNS are made, at most MAX_TURNS.
    """
    for run in runs.values():
        run()
    start = time.perf_counter()
    for run in runs.values():
        run()
    round_s = time.perf_counter() - start
    turn_s = max(round_s, 1e-9) * (1 + RUNS_A_TURN)
    turns = max(MIN_TURNS, min(MAX_TURNS, int(budget_s / turn_s)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            run()
            for _ in range(RUNS_A_TURN):
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: summarise(values) for name, values in times.items()}


def summarise(values: list[float]) -> Sample:
    """Of milliseconds in any order."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return Sample(statistics.median(ordered), at(0.1), at(0.9), len(ordered))
