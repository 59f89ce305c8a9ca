"""How often runs on a device are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu, gpu_paged
from benchmarks.gpu_cases import GpuCase
from benchmarks.gpu_peers import Contender


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
    """Medians of 11 runs were within 1% of each other, and a row may lose 2%; and where tensors
    lay in memory moved rows by 1%, so that they are put elsewhere twice."""
    ran = torch.tensor(0.1)
    runs = {label: lambda: ran for label in ("contiguous", "sdpa-flash", "page16")}
    bounds = {label: lambda: ran / 2 for label in ("contiguous", "page16")}
    monkeypatch.setattr(gpu_paged, "_runs", lambda _: (runs, bounds))
    monkeypatch.setattr(gpu_paged, "PAGE_SIZES", (16,))
    monkeypatch.setattr(gpu_paged, "SHAPES", (GpuCase("full", 1, 1, 1, 1, 16, 16),))
    rows = list(gpu_paged.paged_suite(lambda _: True))
    assert [row.num_runs for row in rows] == [93] * 5
    of_tensor, of_pages = ["sdpa-flash", "reading"], ["contiguous", "sdpa-flash", "reading"]
    assert [row.peer for row in rows] == [*of_tensor, *of_pages]
    assert not any(row.lost for row in rows)
    assert rows[4].ratio == pytest.approx(0.5)


def test_reading_is_timed_beside_decode(told_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives nothing to be compared, and is no peer that wins."""
    peer = Contender(lambda case, learned: lambda query, key, value: query)
    monkeypatch.setattr(gpu, "DECODE", (GpuCase("full", 1, 1, 1, 1, 1, 1),))
    monkeypatch.setattr(gpu, "CONTENDERS", {"attnloom": peer, "peer": peer})
    monkeypatch.setattr(gpu, "taking_part", tuple)
    monkeypatch.setattr(GpuCase, "inputs", lambda _: [torch.tensor(x) for x in (0.2, 0.1, 0.1)])
    monkeypatch.setattr(gpu, "_reading", lambda inputs: lambda: inputs[1])
    rows = list(gpu.decode_suite(lambda _: True, ["peer"]))
    assert [(row.peer, row.lost) for row in rows] == [("peer", False), ("reading", False)]
    assert rows[1].ratio == pytest.approx(0.5)
