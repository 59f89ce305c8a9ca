"""How far our kernels and torch's are from the float64 oracle on a CUDA device, same inputs.

The figure is that of accuracy.py, a mean over NUM_SEEDS inputs: of a single one, ratios of errors
differ by a few percent from draw to draw where both round in other places. `triton` is our portable
backend where `attnloom` chose another.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnloom.backends.reference import reference_attention
from benchmarks.accuracy import (
    NAMES,
    Tensors,
    relative_errors,
    standard_error_of_ratio,
    with_gradients,
)
from benchmarks.cases import DTYPES
from benchmarks.gpu_cases import DEVICE, GpuCase
from benchmarks.gpu_peers import CONTENDERS, OURS, Attention, forget_graphs
from benchmarks.rows import Row

CASES = tuple(
    GpuCase(variant, 1, 4, 4, 512, 512, head_dim)
    for variant, head_dim in (
        ("causal", 64),
        ("causal", 128),
        ("documents12", 64),
        ("causal+alibi", 128),
        ("causal+softcap", 128),
    )
)
PEERS = ("triton", "torch-flex")
NUM_SEEDS = 24
Errors = dict[str, float]


def gpu_errors_suite(
    peers: tuple[str, ...], dtypes: tuple[str, ...], keeps: Callable[[str], bool]
) -> Iterator[Row]:
    """One row for each case, dtype, tensor and peer."""
    for dtype in dtypes:
        for case in CASES:
            if keeps(case.name):
                yield from _case_rows(case, dtype, tuple(p for p in PEERS if p in peers))


def _case_rows(case: GpuCase, dtype: str, peers: tuple[str, ...]) -> Iterator[Row]:
    forget_graphs()
    attentions: dict[str, Any] = {}
    errors: dict[str, list[Errors]] = {name: [] for name in ("attnloom", *peers)}
    for seed in range(NUM_SEEDS):
        *inputs, dout = _drawn(case, dtype, seed)
        expected = _oracle(case, inputs, dout)
        for name in tuple(errors):
            try:
                if name not in attentions:
                    attentions[name] = CONTENDERS[name].prepare(case, None)
                attention = attentions[name]
                assert attention is not None, "it takes no such case"
                errors[name].append(relative_errors(_run(attention, inputs, dout), expected))
            except Exception as error:
                if name in OURS:
                    raise
                del errors[name]
                print(f"{name} cannot run {case.name} in {dtype}: {error}"[:200], file=sys.stderr)
    for peer in [name for name in errors if name != "attnloom"]:
        for name in NAMES:
            mine, theirs = ([draw[name] for draw in errors[who]] for who in ("attnloom", peer))
            yield Row(
                "errors", case.name, f"error of {name}", "ppm", statistics.fmean(mine),
                dtype=dtype, shape=case.shape, density=case.density(), peer=peer,
                theirs=statistics.fmean(theirs), num_runs=NUM_SEEDS,
                ratio_error=standard_error_of_ratio(mine, theirs),
            )  # fmt: skip


def _drawn(case: GpuCase, dtype: str, seed: int) -> list[torch.Tensor]:
    """query, key, value and the gradient of the output."""
    draw = torch.Generator(device=DEVICE).manual_seed(seed)
    size = (case.batch, case.heads, case.q_len, case.head_dim)
    drawn = (torch.randn(size, generator=draw, device=DEVICE) for _ in range(4))
    return [x.to(DTYPES[dtype]) for x in drawn]


def _oracle(case: GpuCase, inputs: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    query, key, value = leaves = [x.double().requires_grad_() for x in inputs]
    out = reference_attention(query, key, value, case.score_mod(None), case.mask_mod).out
    return with_gradients(out, leaves, dout.double())


def _run(attention: Attention, inputs: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return with_gradients(attention(*leaves), leaves, dout)
