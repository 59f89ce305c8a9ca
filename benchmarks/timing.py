"""Alternating repeats in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_RUNS, MAX_RUNS = 7, 40


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of repeated runs: median, 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    num_runs: int


def alternate(runs: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, Sample]:
    """Time callables in turn, so that drift of the machine meets all of them alike.

    Args:
        runs: each is called twice before anything counts.
        budget_s: aim at this much time in all; at least MIN_RUNS rounds are made, at most MAX_RUNS.
    """
    for run in runs.values():
        run()
    start = time.perf_counter()
    for run in runs.values():
        run()
    round_s = time.perf_counter() - start
    rounds = max(MIN_RUNS, min(MAX_RUNS, int(budget_s / max(round_s, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: _summarise(values) for name, values in times.items()}


def _summarise(values: list[float]) -> Sample:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return Sample(statistics.median(ordered), at(0.1), at(0.9), len(ordered))
