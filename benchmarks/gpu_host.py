"""The host's time for a call on a CUDA device: until the call returns, its kernels queued.

Every call is timed on its own and a row is the median of them, since a mean of 500 is one hiccup
in disguise: torch.compile, a peer here, leaves half a million objects behind, and Python looks
through all of them now and then, whoever happens to be running. Calls that stand out are told
beside the row, with the time that was spent on such collections meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.gpu_cases import GpuCase
from benchmarks.gpu_peers import CONTENDERS, forget_graphs
from benchmarks.rows import Row
from benchmarks.timing import Sample, summarise

VARIANTS = ("full", "causal", "causal+alibi")
_WARMUP, _RUNS, _TURNS = 20, 25, 20
Key = TypeVar("Key")
_STANDS_OUT = 10  # times the median


@dataclass(frozen=True, slots=True)
class Calls:
    """Milliseconds of calls in their order, and of garbage collections by the call they fell in."""

    times_ms: list[float]
    collecting_ms: dict[int, float]

    def then(self, later: Calls) -> Calls:
        """These calls and those after them."""
        moved = {len(self.times_ms) + i: took for i, took in later.collecting_ms.items()}
        return Calls(self.times_ms + later.times_ms, self.collecting_ms | moved)

    @property
    def sample(self) -> Sample:
        return summarise(self.times_ms)

    @property
    def hiccups(self) -> list[str]:
        """Calls that took _STANDS_OUT times the median, and what of that went to collections."""
        limit = _STANDS_OUT * self.sample.median_ms
        return [
            f"call {i} took {took:.2f} ms, {self.collecting_ms.get(i, 0.0):.2f} of them to collect "
            "garbage"
            for i, took in enumerate(self.times_ms)
            if took > limit
        ]


def host_rows(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """Microseconds of a call for each of VARIANTS, beside torch's flex_attention."""
    cases = [GpuCase(variant, 1, 2, 2, 256, 256, 64) for variant in VARIANTS]
    cases = [case for case in cases if keeps(case.name)]
    names = ("attnloom", "torch-flex")
    forget_graphs()
    found = in_turn({(name, case.name): _warm(name, case) for case in cases for name in names})
    for (name, case), calls in found.items():
        for told in calls.hiccups:
            print(f"{name} {case}: {told}", file=sys.stderr)
    for case in cases:
        ours, theirs = (found[name, case.name].sample for name in names)
        yield Row(
            "gpu", case.name, "overhead", "us", ours.median_ms * 1e3, dtype="bf16",
            shape=case.shape, peer="torch-flex", theirs=theirs.median_ms * 1e3,
            ours_p10=ours.p10_ms * 1e3, ours_p90=ours.p90_ms * 1e3,
            theirs_p10=theirs.p10_ms * 1e3, theirs_p90=theirs.p90_ms * 1e3,
            num_runs=ours.num_runs,
        )  # fmt: skip


def _warm(name: str, case: GpuCase) -> Callable[[], Any]:
    attention, inputs = CONTENDERS[name].prepare(case, None), case.inputs()
    assert attention is not None
    for _ in range(_WARMUP):
        attention(*inputs)
    return lambda: attention(*inputs)


def in_turn(calls: dict[Key, Callable[[], Any]]) -> dict[Key, Calls]:
    """Times of each, a few calls at a time and round about: a processor that changes its speed from
    second to second does so for all of them."""
    found = {key: Calls([], {}) for key in calls}
    for _ in range(_TURNS):
        for key, call in calls.items():
            _wait()
            call()  # finds its own memory again
            found[key] = found[key].then(timed_calls(call, _RUNS))
    _wait()
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_calls(call: Callable[[], Any], num_runs: int) -> Calls:
    """Times of `call`, one by one. Python's collector stays as it is."""
    times: list[float] = []
    with _collections(lambda: len(times)) as collecting:
        for _ in range(num_runs):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return Calls(times, collecting)


@contextlib.contextmanager
def _collections(place: Callable[[], int]) -> Iterator[dict[int, float]]:
    """Milliseconds of the collections that happen inside, by where they do."""
    found: dict[int, float] = {}
    start = 0.0

    def told(phase: str, info: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.perf_counter()
        else:
            at = place()
            found[at] = found.get(at, 0.0) + (time.perf_counter() - start) * 1e3

    gc.callbacks.append(told)
    try:
        yield found
    finally:
        gc.callbacks.remove(told)
