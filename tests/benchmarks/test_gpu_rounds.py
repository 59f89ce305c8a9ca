"""How often runs on a device are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu, gpu_paged
from benchmarks.gpu_cases import GpuCase


@pytest.fixture
def told_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs give their own times."""
    monkeypatch.setattr(gpu, "_timed", lambda run: float(run()))


def test_short_runs_are_timed_as_often_as_asked_for(told_times: None) -> None:
    turns: list[str] = []
    times = {"short": 0.1, "long": 100.0, "longest": 3000.0}

    def run(name: str) -> float:
        turns.append(name)
        return times[name]

    runs = {name: (lambda name=name: run(name)) for name in times}
    samples = gpu.alternate(runs, 31)
    assert {name: sample.num_runs for name, sample in samples.items()} == {
        "short": 31, "long": 4, "longest": 1,
    }  # fmt: skip
    rounds = [turns[i : i + 2] for i in range(5, 13, 2)]
    assert all(sorted(names) == ["long", "short"] for names in rounds)
    assert rounds.count(rounds[0]) < len(rounds), "one is always timed after the other"
    assert gpu.alternate(runs)["short"].num_runs == gpu.ROUNDS


def test_pages_are_timed_more_often(told_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of 11 runs were within 1% of each other, and a row may lose 2%."""
    ran = torch.tensor(0.1)
    labels = ("contiguous", "sdpa-flash", "page16")
    monkeypatch.setattr(gpu_paged, "_runs", lambda _: {label: lambda: ran for label in labels})
    monkeypatch.setattr(gpu_paged, "SHAPES", (GpuCase("full", 1, 1, 1, 1, 16, 16),))
    rows = list(gpu_paged.paged_suite(lambda _: True))
    assert [row.num_runs for row in rows] == [31, 31]
