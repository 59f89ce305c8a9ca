"""The suites: each yields Rows as they are measured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    accuracy,
    fresh,
    gallery,
    gpu,
    gpu_accuracy,
    gpu_first,
    gpu_masks,
    gpu_paged,
    host,
)
from benchmarks.cases import Case, decode_cases, prefill_cases
from benchmarks.contenders import CONTENDERS, Attention, density
from benchmarks.rows import Row
from benchmarks.timing import Sample, alternate

# Largest difference between two contenders, over the largest output.
_AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run. cases: substrings of case names, empty for all. budget_s: time for the repeats
    of one phase of one case."""

    ours: str
    peers: tuple[str, ...]
    dtypes: tuple[str, ...]
    cases: tuple[str, ...] = ()
    all_sizes: bool = False
    budget_s: float = 4.0
    gpu_peers: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        return not self.cases or any(part in name for part in self.cases)


def cpu_suite(selection: Selection) -> Iterator[Row]:
    """Forward and backward of prefill, decode, and what a process pays once."""
    dtypes = list(selection.dtypes)
    for case in prefill_cases(dtypes, selection.all_sizes):
        if selection.keeps(case.name):
            yield from _compare_forward(case, "forward", selection)
            yield from _compare_backward(case, selection)
    for case in decode_cases(dtypes):
        if selection.keeps("decode-" + case.name):
            yield from _compare_forward(case, "decode", selection)
    yield from _cpu_compile(selection)


def compile_suite(selection: Selection) -> Iterator[Row]:
    """What a process pays once, on the CUDA device where there is one."""
    if torch.cuda.is_available():
        return gpu_first.gpu_first_suite(selection.keeps, selection.gpu_peers)
    return _cpu_compile(selection)


def _cpu_compile(selection: Selection) -> Iterator[Row]:
    """First call with a cold and with a warm disk cache, host overhead, extra memory."""
    for backward in (False, True):
        yield from _first_calls(backward, selection)
    yield from _overhead(selection)
    yield from _extra_memory(selection)


def mask_suite(selection: Selection) -> Iterator[Row]:
    """create_block_mask at block size 128: on a CUDA device where there is one, else on the CPU,
    each in a process of its own."""
    if torch.cuda.is_available():
        yield from gpu_masks.gpu_mask_suite(selection.keeps)
        return
    builds = [(kind, 2**20, ()) for kind in ("window1024", "documents1000", "causal")]
    builds += [(kind, size, ("torch",)) for size in (4096, 16384) for kind in fresh.MASKS]
    with tempfile.TemporaryDirectory() as cache:
        for kind, length, peers in builds:
            name = f"{kind}-s{length}"
            if not selection.keeps(name):
                continue
            shape = [1, 1, 1, length, length, 0]
            ours_module = "attnloom" if selection.ours.startswith("attnloom") else "torch"
            ours, *others = (
                _fresh("build_mask", Path(cache), module=module, kind=kind, length=length)
                for module in (ours_module, *peers)
            )
            for unit in ("ms", "mib"):
                phase = "build" if unit == "ms" else "memory"
                row = Row("mask", name, phase, unit, ours[unit], shape=shape)
                yield from _with_peers(row, peers, [other[unit] for other in others])


def errors_suite(selection: Selection) -> Iterator[Row]:
    """Distances from the oracle, on the CUDA device where there is one."""
    if torch.cuda.is_available():
        return gpu_accuracy.gpu_errors_suite(selection.gpu_peers, selection.dtypes, selection.keeps)
    return accuracy.errors_suite(selection.ours, selection.peers, selection.dtypes, selection.keeps)


SUITES: dict[str, Callable[[Selection], Iterator[Row]]] = {
    "cpu": cpu_suite,
    "mask": mask_suite,
    "compile": compile_suite,
    "errors": errors_suite,
    "gallery": lambda selection: gallery.gallery_suite(selection.keeps, selection.budget_s),
    "gpu": lambda selection: gpu.gpu_suite(selection.keeps, selection.gpu_peers),
    "host": lambda selection: host.host_suite(selection.keeps),
    "decode": lambda selection: gpu.decode_suite(selection.keeps, selection.gpu_peers),
    "paged": lambda selection: gpu_paged.paged_suite(selection.keeps),
    "scaling": lambda selection: gpu.scaling_suite(selection.keeps, selection.gpu_peers),
}


def _compare_forward(case: Case, phase: str, selection: Selection) -> Iterator[Row]:
    inputs = case.inputs()
    runs = _prepared(case, selection, backward=False)
    with torch.no_grad():
        _require_agreement(case, {name: run(*inputs) for name, run in runs.items()})
        samples = alternate(
            {name: (lambda run=run: run(*inputs)) for name, run in runs.items()},
            selection.budget_s,
        )
    yield from _rows(case, phase, samples, selection)


def _require_agreement(case: Case, outputs: dict[str, torch.Tensor]) -> None:
    """A speed counts only where every contender computes the same thing."""
    (ours, expected), *others = outputs.items()
    limit = _AGREEMENT[case.dtype] * float(expected.float().abs().max())
    for name, output in others:
        error = float((output.float() - expected.float()).abs().max())
        if not error <= limit:
            raise RuntimeError(
                f"{case.name} {case.dtype}: {ours} and {name} differ by {error:.3g} (at most "
                f"{limit:.3g} is rounding), so one of them is wrong and neither is timed"
            )


def _compare_backward(case: Case, selection: Selection) -> Iterator[Row]:
    inputs = [x.requires_grad_() for x in case.inputs()]
    dout = torch.randn_like(inputs[0])
    steps = {}
    for name, attention in _prepared(case, selection, backward=True).items():
        out = attention(*inputs)
        steps[name] = lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    yield from _rows(case, "backward", alternate(steps, selection.budget_s), selection)


def _prepared(case: Case, selection: Selection, backward: bool) -> dict[str, Attention]:
    """Ours first, then every peer that can run the case."""
    prepared = {}
    for name in (selection.ours, *selection.peers):
        contender = CONTENDERS[name]
        if backward and not contender.has_backward:
            continue
        attention = contender.prepare(case)
        if attention is not None:
            prepared[name] = attention
    return prepared


def _rows(
    case: Case, phase: str, samples: dict[str, Sample], selection: Selection
) -> Iterator[Row]:
    ours = samples.get(selection.ours)
    if ours is None:
        return
    kept = density(case)
    for name, sample in samples.items():
        if name == selection.ours:
            continue
        yield Row(
            "cpu",
            case.name,
            phase,
            "ms",
            ours.median_ms,
            dtype=case.dtype,
            shape=case.shape,
            density=kept,
            peer=name,
            theirs=sample.median_ms,
            ours_p10=ours.p10_ms,
            ours_p90=ours.p90_ms,
            theirs_p10=sample.p10_ms,
            theirs_p90=sample.p90_ms,
            num_runs=ours.num_runs,
        )


def _first_calls(backward: bool, selection: Selection) -> Iterator[Row]:
    case = Case("causal_softcap", 1, 4, 4, 256, 256, 64, "fp32")
    if not selection.keeps(case.name):
        return
    peers = tuple(p for p in selection.peers if p == "torch-flex" and not backward)
    for phase in ("first_step", "warm_step") if backward else ("first_call", "warm_call"):
        results = []
        for contender in (selection.ours, *peers):
            with tempfile.TemporaryDirectory() as cache:
                arguments = {"contender": contender, "case": case, "backward": backward}
                result = _fresh("first_call", Path(cache), **arguments)
                if phase.startswith("warm"):
                    result = _fresh("first_call", Path(cache), **arguments)
            results.append(result["ms"])
        row = Row("compile", case.name, phase, "ms", results[0], dtype=case.dtype, shape=case.shape)
        yield from _with_peers(row, peers, results[1:])


def _overhead(selection: Selection) -> Iterator[Row]:
    """A repeated call on 16 tokens: its kernel takes a few microseconds, the rest is overhead."""
    for variant in ("full", "causal_alibi"):
        case = Case(variant, 1, 1, 1, 16, 16, 16, "fp32")
        if not selection.keeps(case.name):
            continue
        attention = CONTENDERS[selection.ours].prepare(case)
        assert attention is not None
        for needs_grad in (False, True):
            inputs = [x.requires_grad_(needs_grad) for x in case.inputs()]

            def run(attention=attention, inputs=inputs):
                for _ in range(100):
                    attention(*inputs)

            with torch.set_grad_enabled(needs_grad):
                sample = alternate({"ours": run}, budget_s=1.0)["ours"]
            yield Row(
                "compile",
                case.name + ("-grad" if needs_grad else ""),
                "overhead",
                "us",
                sample.median_ms * 10,
                dtype=case.dtype,
                shape=case.shape,
                ours_p10=sample.p10_ms * 10,
                ours_p90=sample.p90_ms * 10,
                num_runs=sample.num_runs * 100,
            )


def _extra_memory(selection: Selection) -> Iterator[Row]:
    case = Case("causal_alibi", 1, 8, 8, 4096, 4096, 64, "fp32")
    if not selection.keeps(case.name):
        return
    peers = tuple(p for p in selection.peers if p == "sdpa")
    with tempfile.TemporaryDirectory() as cache:
        ours, *others = (
            _fresh("memory", Path(cache), contender=contender, case=case)["mib"]
            for contender in (selection.ours, *peers)
        )
    row = Row("compile", case.name, "memory", "mib", ours, dtype=case.dtype, shape=case.shape)
    yield from _with_peers(row, peers, others)


def _with_peers(row: Row, peers: tuple[str, ...], values: list[float]) -> Iterator[Row]:
    """The row once for each peer, or once alone."""

    if not peers:
        yield row
    for peer, value in zip(peers, values, strict=True):
        yield replace(row, peer=peer, theirs=value)


def _fresh(action: str, cache: Path, **arguments: Any) -> dict[str, float]:
    return fresh.measure(action, cache, torch.get_num_threads(), **arguments)
