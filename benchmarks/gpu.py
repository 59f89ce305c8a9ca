"""The suites on a CUDA device: prefill forward and backward, decode, scaling.

Kernels are timed by device events with work queued ahead of them, so that the time the host takes
is not in them; it is measured apart (gpu_host.py).
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu_cases import DECODE, DEVICE, PREFILL, SCALING, GpuCase
from benchmarks.gpu_host import host_rows
from benchmarks.gpu_peers import (
    CONTENDERS,
    OURS,
    Attention,
    Contender,
    forget_graphs,
    summary,
    taking_part,
)
from benchmarks.rows import READING, Row
from benchmarks.timing import Sample, summarise

ROUNDS = 11
_HEAD_START = 8_000_000  # device cycles, about 4 ms: longer than any call of a busy host
_AGREEMENT = 3e-2  # largest difference of two outputs over the largest element, bf16
_WARMUP_MS = 2000.0  # a run longer than this is timed once, and needs no warming up
_ENOUGH_MS = 400.0  # runs of one contender that take this long together are enough
_ENOUGH_SCALING_MS = 150.0  # of 240 comparisons, so that a head dimension takes two minutes
_FEWEST = 3

Keeps = Callable[[str], bool]
Results = dict[str, tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Phase:
    """One phase of one case: `start` gives, for an attention and its inputs, what is timed.

    bound: what none can beat on these inputs, timed beside them as the peer READING.
    """

    suite: str
    name: str
    case: GpuCase
    start: Callable[[Attention, Sequence[torch.Tensor]], Callable[[], Any]]
    bound: Callable[[Sequence[torch.Tensor]], Callable[[], Any]] | None = None


class DisagreementError(RuntimeError):
    """Contenders gave different results; raised once everything else was measured."""


@dataclass(frozen=True, slots=True)
class _Field:
    """Peers that are there, how long each is timed, and who gave other results than ours."""

    peers: tuple[str, ...]
    enough_ms: float = _ENOUGH_MS
    disagreements: list[str] = field(default_factory=list)

    def compare(self, phase: _Phase) -> Iterator[Row]:
        """A Row for each peer that takes part; a speed counts only where results agree."""
        runs, results = _results(phase, self.peers)
        for name, error in _disagreeing(phase, results).items():
            self.disagreements.append(error)
            print(error, file=sys.stderr, flush=True)
            del runs[name]
        del results
        if len(runs) > 1:
            yield from _rows(phase, alternate(runs, enough_ms=self.enough_ms))

    def require_agreement(self) -> None:
        """
        Raises:
            DisagreementError: somebody was wrong, ours perhaps.
        """
        if self.disagreements:
            raise DisagreementError("; ".join(self.disagreements))


def gpu_suite(keeps: Keeps, peers: Sequence[str]) -> Iterator[Row]:
    """Forward and backward of PREFILL, the share of the peak, the host's time for a call."""
    contest = _Field(taking_part(peers))
    for case in PREFILL:
        if keeps(case.name):
            yield from contest.compare(_forward("gpu", "forward", case))
            yield from contest.compare(_backward("gpu", case))
            if case is PREFILL[0]:
                yield _share_of_peak(case)
    if "torch-flex" in peers:
        yield from host_rows(keeps)
    contest.require_agreement()


def decode_suite(keeps: Keeps, peers: Sequence[str]) -> Iterator[Row]:
    """DECODE: one query against a long cache, and the time of reading it."""
    contest = _Field(taking_part(peers))
    for case in DECODE:
        if keeps("decode-" + case.name):
            phase = replace(_forward("decode", "decode", case), bound=_reading)
            yield from contest.compare(phase)
    contest.require_agreement()


def scaling_suite(keeps: Keeps, peers: Sequence[str]) -> Iterator[Row]:
    """SCALING: causal attention over lengths, head dimensions and groups."""
    contest = _Field(taking_part(peers), _ENOUGH_SCALING_MS)
    for case in SCALING:
        if keeps(case.name):
            yield from contest.compare(_forward("scaling", "forward", case))
            yield from contest.compare(_backward("scaling", case))
    contest.require_agreement()


def rehearse(suite: str, case: GpuCase, peers: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each phase of a case and who ran it, once and untimed."""
    for phase in (_forward(suite, "forward", case), _backward(suite, case)):
        runs, _ = _results(phase, peers)
        torch.cuda.synchronize()
        yield phase.name, list(runs)


def _reading(inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    from benchmarks.gpu_reading import reading  # needs Triton

    return reading(inputs[1].detach(), inputs[2].detach())


def _forward(suite: str, name: str, case: GpuCase) -> _Phase:
    def start(attention: Attention, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
        query, key, value = (x.detach() for x in inputs[:3])
        return functools.partial(attention, query, key, value)

    return _Phase(suite, name, case, start)


def _backward(suite: str, case: GpuCase) -> _Phase:
    def start(attention: Attention, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
        query, key, value = inputs[:3]
        out = attention(query, key, value)
        draw = torch.Generator(device=DEVICE).manual_seed(2)
        size = (case.batch, case.heads, case.q_len, case.head_dim)
        dout = torch.randn(size, generator=draw, dtype=out.dtype, device=DEVICE)
        if out.shape != dout.shape:
            dout = dout.transpose(1, 2).contiguous()
        return functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)

    return _Phase(suite, "backward", case, start)


def _rows(phase: _Phase, samples: dict[str, Sample]) -> Iterator[Row]:
    ours, kept = samples["attnloom"], phase.case.density()
    for name, sample in samples.items():
        if name == "attnloom":
            continue
        yield Row(
            phase.suite,
            phase.case.name,
            phase.name,
            "ms",
            ours.median_ms,
            dtype="bf16",
            shape=phase.case.shape,
            density=kept,
            peer=name,
            theirs=sample.median_ms,
            ours_p10=ours.p10_ms,
            ours_p90=ours.p90_ms,
            theirs_p10=sample.p10_ms,
            theirs_p90=sample.p90_ms,
            num_runs=ours.num_runs,
        )


def _results(
    phase: _Phase, peers: Sequence[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, tuple[torch.Tensor, ...]]]:
    """What to time, and the results of each; a peer that refuses the case is told and left out."""
    runs: dict[str, Callable[[], Any]] = {}
    results: Results = {}
    learned = phase.case.learned_table()
    forget_graphs()
    inputs = [x.requires_grad_() for x in phase.case.inputs()]
    for name in ("attnloom", *peers):
        contender = CONTENDERS[name]
        try:
            table = None if learned is None else learned.detach().requires_grad_()
            attention = contender.prepare(phase.case, table)
            if attention is None:
                continue
            placed = [contender.place(x) for x in inputs]
            if table is not None:
                placed.append(table)
            run = phase.start(attention, placed)
            results[name] = _parts(contender, run())
            runs[name] = run
        except Exception as error:
            if name in OURS:
                raise
            print(
                f"{name} cannot run {phase.name} of {phase.case.name}: {summary(error)}",
                file=sys.stderr,
                flush=True,
            )
    if phase.bound is not None:
        runs[READING] = phase.bound(inputs)
    return runs, results


def _parts(contender: Contender, result: Any) -> tuple[torch.Tensor, ...]:
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(contender.restore(part) for part in parts)


def _disagreeing(phase: _Phase, results: Results) -> dict[str, str]:
    """The contenders whose results are not those of the first, and what is said of each."""
    (ours, expected), *others = results.items()
    found: dict[str, str] = {}
    for name, parts in others:
        for one, other in zip(expected, parts, strict=True):
            limit = _AGREEMENT * float(one.float().abs().max())
            error = float((other.float() - one.float()).abs().max())
            if not error <= limit:
                found[name] = (
                    f"{phase.name} of {phase.case.name}: {ours} and {name} differ by {error:.3g} "
                    f"(at most {limit:.3g} is rounding), so one of them is wrong"
                )
    return found


def _share_of_peak(case: GpuCase) -> Row:
    """Our forward's rate over that of a bf16 matrix product, measured one after the other."""
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    inputs = case.inputs()
    attention = CONTENDERS["attnloom"].prepare(case, None)
    assert attention is not None
    samples = alternate({"product": lambda: left @ right, "ours": lambda: attention(*inputs)})
    flops = 4 * case.batch * case.heads * case.q_len * case.kv_len * case.head_dim
    share = flops / samples["ours"].median_ms / (2 * size**3 / samples["product"].median_ms)
    return Row("gpu", case.name, "peak", "pct", 100 * share, dtype="bf16", shape=case.shape)


def alternate(
    runs: dict[str, Callable[[], Any]], most: int = ROUNDS, enough_ms: float = _ENOUGH_MS
) -> dict[str, Sample]:
    """Device milliseconds of each run, of as many as `taken_in_turn` gives."""
    return {
        name: summarise(values) for name, values in taken_in_turn(runs, most, enough_ms).items()
    }


def taken_in_turn(
    runs: dict[str, Callable[[], Any]], most: int = ROUNDS, enough_ms: float = _ENOUGH_MS
) -> dict[str, list[float]]:
    """Device milliseconds of each run, `most` times where that is soon done.

    Each round has another order: after some runs the next is slower than after others.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = dict.fromkeys(runs, most)
    for name, run in runs.items():
        first = _timed(run)
        if first > _WARMUP_MS:
            times[name].append(first)
            rounds[name] = 0
        else:
            run()
            rounds[name] = min(most, max(_FEWEST, round(enough_ms / first)))
    for turn in range(most):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            if turn < rounds[name]:
                times[name].append(_timed(runs[name]))
    return times


def _timed(run: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)
