"""How far each contender is from the float64 oracle, on the same inputs.

The figure is the root mean square of the error over that of the oracle, in parts per million:
||x - oracle|| / ||oracle|| * 1e6, a mean over several inputs. float32's unit roundoff is 0.06,
bfloat16's 3,900 of these.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from attnloom.backends.reference import reference_attention
from benchmarks.cases import DTYPES, PREFILL_VARIANTS, VARIANTS, Case
from benchmarks.contenders import CONTENDERS, density
from benchmarks.rows import Row

NAMES = ("out", "dq", "dk", "dv")
NUM_SEEDS = 8
Tensors = dict[str, torch.Tensor]


def error_cases(dtypes: tuple[str, ...]) -> list[Case]:
    """Every prefill variant at 384 tokens; inputs of unit variance."""
    return [
        Case(variant, 1, 4, 4, 384, 384, 64, dtype)
        for dtype in dtypes
        for variant in PREFILL_VARIANTS
    ]


def errors_suite(
    ours: str, peers: tuple[str, ...], dtypes: tuple[str, ...], keeps: Callable[[str], bool]
) -> Iterator[Row]:
    """One row for each case, tensor and peer, a mean over NUM_SEEDS inputs; x10 says that inputs
    were scaled by ten."""
    for case in error_cases(dtypes):
        if not keeps(case.name):
            continue
        for factor, suffix in ((1.0, ""), (10.0, " x10")):
            draws = [
                _errors_of_one_draw(case, factor, seed, (ours, *peers)) for seed in range(NUM_SEEDS)
            ]
            for row in _rows(case, draws, ours, peers):
                yield replace(row, case=row.case + suffix)


def _errors_of_one_draw(
    case: Case, factor: float, seed: int, contenders: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Errors by contender and tensor."""
    inputs = [x * factor for x in case.inputs(seed)]
    generator = torch.Generator().manual_seed(1_000 + seed)
    dout = torch.randn(inputs[0].shape, generator=generator).to(DTYPES[case.dtype])
    expected = _oracle(case, inputs, dout)
    return {name: relative_errors(_run(name, case, inputs, dout), expected) for name in contenders}


def _oracle(case: Case, inputs: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    variant = VARIANTS[case.variant]
    query, key, value = leaves = [x.double().requires_grad_() for x in inputs]
    out = reference_attention(
        query,
        key,
        value,
        variant.score(case.num_heads) if variant.score else None,
        variant.mask(case.kv_len) if variant.mask else None,
    ).out
    return with_gradients(out, leaves, dout.double())


def _run(name: str, case: Case, inputs: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    """out and, where it can differentiate, gradients; empty if it cannot run the case."""
    contender = CONTENDERS[name]
    attention = contender.prepare(case)
    if attention is None:
        return {}
    leaves = [x.clone().requires_grad_(contender.has_backward) for x in inputs]
    out = attention(*leaves)
    return with_gradients(out, leaves, dout) if contender.has_backward else {"out": out}


def with_gradients(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    """out and the gradients of query, key and value by name."""
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def relative_errors(results: Tensors, expected: Tensors) -> dict[str, float]:
    """Of each result, in parts per million."""
    return {
        name: float((x.double() - expected[name]).norm() / expected[name].norm()) * 1e6
        for name, x in results.items()
    }


def _rows(
    case: Case, draws: Sequence[dict[str, dict[str, float]]], ours: str, peers: tuple[str, ...]
) -> Iterator[Row]:
    for name in NAMES:
        for peer in peers:
            if name in draws[0][peer]:
                mine, theirs = ([draw[who][name] for draw in draws] for who in (ours, peer))
                yield Row(
                    suite="errors",
                    case=case.name,
                    phase=f"error of {name}",
                    unit="ppm",
                    ours=statistics.fmean(mine),
                    dtype=case.dtype,
                    shape=case.shape,
                    density=density(case),
                    peer=peer,
                    theirs=statistics.fmean(theirs),
                    num_runs=len(draws),
                    ratio_error=standard_error_of_ratio(mine, theirs),
                )


def standard_error_of_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of fmean(theirs) / fmean(ours), for errors on the same inputs (delta method)."""
    mean = statistics.fmean(ours)
    ratio = statistics.fmean(theirs) / mean
    residuals = [y - ratio * x for x, y in zip(ours, theirs, strict=True)]
    return statistics.stdev(residuals) / mean / math.sqrt(len(ours))
