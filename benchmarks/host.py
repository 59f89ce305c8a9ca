"""The host's time for a call on a GPU, on a machine that need not have one (`pretended.py`).

Beside it two yardsticks: a torch.empty and an addition of small tensors, on the same machine at the
same time. The goal of 40 us on an H200's host is 4.3 of that host's additions (9.2 us). What a GPU
adds here is left out: the driver's own work (5 to 8 us a kernel there) and its memory allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import attnloom
from benchmarks.rows import Row
from benchmarks.timing import Sample, summarise

SUITE = "host"
_REPEATS = 50
_TURNS = 30
Keeps = Callable[[str], bool]
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class HostCase:
    """A call, small enough that only the host's time matters.

    mods: a key of MODS. backend: as kernel_options has it.
    """

    mods: str
    backend: str = "auto"
    q_len: int = 256

    @property
    def name(self) -> str:
        phase = "decode-" if self.q_len == 1 else ""
        return f"{phase}{self.mods}-{self.backend}"

    def inputs(self) -> list[torch.Tensor]:
        lengths = (self.q_len, 256, 256)
        return [torch.zeros(1, 2, length, 64, dtype=torch.bfloat16) for length in lengths]

    def attention(self) -> Callable[..., torch.Tensor]:
        score_mod, mask_mod = MODS[self.mods]()
        block_mask = None
        if mask_mod is not None:
            sizes = (None, None, self.q_len, 256)
            block_mask = attnloom.create_block_mask(mask_mod, *sizes, device="cpu")
        options: attnloom.FlexKernelOptions = {"backend": self.backend}
        return lambda q, k, v: attnloom.flex_attention(
            q, k, v, score_mod, block_mask, kernel_options=options
        )


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _alibi() -> Callable[..., Any]:
    slopes = 0.5 ** torch.arange(1, 3)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def _documents() -> Callable[..., Any]:
    ids = torch.arange(256) // 100
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


MODS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "full": lambda: (None, None),
    "causal": lambda: (None, _causal),
    "causal+alibi": lambda: (_alibi(), _causal),
    "documents": lambda: (None, _documents()),
}
CASES = (
    *(HostCase(mods) for mods in MODS),
    *(HostCase(mods, "gluon") for mods in MODS),
    HostCase("full", q_len=1),
    HostCase("documents", q_len=1),
)


def host_suite(keeps: Keeps) -> Iterator[Row]:
    """Forward alone, forward under grad, backward."""
    from benchmarks.pretended import hopper  # needs Triton

    small, other = torch.zeros(64), torch.zeros(64)
    yardsticks: dict[str, Call] = {
        "torch.empty": lambda: torch.empty((1, 2, 256, 64), dtype=torch.bfloat16, device="cpu"),
        "addition": lambda: small + other,
    }
    for case in CASES:
        if not keeps(case.name):
            continue
        with hopper():
            samples = _in_turn({**_calls(case), **yardsticks})
        for name, sample in samples.items():
            if name not in yardsticks:
                yield _row(f"{case.name}-{name}", case, sample)
            elif case is CASES[0]:
                yield _row(name, case, sample)


def _calls(case: HostCase) -> dict[str, Call]:
    attention, inputs = case.attention(), case.inputs()
    calls: dict[str, Call] = {"forward": lambda: attention(*inputs)}
    if case.q_len == 1:
        return calls
    leaves = [x.clone().requires_grad_() for x in inputs]
    for _ in range(3):  # as in any but the first steps of a training
        out = attention(*leaves)
        dout = torch.zeros_like(out)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    calls["forward-grad"] = lambda: attention(*leaves)
    calls["backward"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return calls


def _in_turn(calls: dict[str, Call]) -> dict[str, Sample]:
    """Milliseconds of the processor for each call, _REPEATS of them at a time; the clock on the
    wall would count what else the machine does."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_TURNS + 1):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(_REPEATS):
                call()
            if turn:  # the first one compiles, or finds what others left behind
                times[name].append((time.process_time() - start) / _REPEATS * 1e3)
    return {name: summarise(values) for name, values in times.items()}


def _row(name: str, case: HostCase, sample: Sample) -> Row:
    return Row(
        SUITE,
        name,
        "overhead",
        "us",
        sample.median_ms * 1e3,
        dtype="bf16",
        shape=[1, 2, 2, case.q_len, 256, 64],
        ours_p10=sample.p10_ms * 1e3,
        ours_p90=sample.p90_ms * 1e3,
        num_runs=sample.num_runs * _REPEATS,
    )
