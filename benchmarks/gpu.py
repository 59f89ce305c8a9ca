"""The suites on a CUDA device: prefill forward and backward, decode, host time of a call.

Kernels are timed by device events with work queued ahead of them, so that the time the host takes
is not in them; it is measured apart.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torch_flex

import attnloom
from benchmarks.cases import Mod
from benchmarks.rows import Row
from benchmarks.timing import Sample

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DEVICE = "cuda"
ROUNDS = 11
_HEAD_START = 2_000_000  # device cycles, about a millisecond: longer than any host call
_AGREEMENT = 3e-2  # largest difference of two outputs over the largest element, bf16


@dataclass(frozen=True, slots=True)
class GpuCase:
    """query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim],
    bf16.

    variant: a key of MASKS, with "+alibi" or "+softcap" behind it for a score_mod.
    """

    variant: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def name(self) -> str:
        group = "" if self.heads == self.kv_heads else f"-g{self.heads // self.kv_heads}"
        return f"{self.variant}-b{self.batch}-s{self.kv_len}-d{self.head_dim}{group}"

    @property
    def shape(self) -> list[int]:
        """[B, Hq, Hkv, q_len, kv_len, D]."""
        return [self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim]

    @property
    def mask_mod(self) -> Mod | None:
        make = MASKS[self.variant.split("+")[0]]
        return None if make is None else make(self.kv_len)

    @property
    def score_mod(self) -> Mod | None:
        _, _, name = self.variant.partition("+")
        return SCORES[name](self.heads) if name else None

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """query, key, value from a fixed seed."""
        draw = torch.Generator(device=DEVICE).manual_seed(0)
        sizes = (
            (self.heads, self.q_len),
            (self.kv_heads, self.kv_len),
            (self.kv_heads, self.kv_len),
        )
        return tuple(
            torch.randn(
                self.batch, heads, length, self.head_dim,
                generator=draw, dtype=torch.bfloat16, device=DEVICE,
            )
            for heads, length in sizes
        )  # fmt: skip


def _causal(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def _window(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def _documents(length: int) -> Mod:
    """Twelve packed causal documents of nearly equal length."""
    ids = torch.arange(length, device=DEVICE) * 12 // length
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def _prefix(length: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < length // 4)


def _alibi(heads: int) -> Mod:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=DEVICE) / heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def _softcap(heads: int) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: 30 * torch.tanh(score / 30)


MASKS: dict[str, Callable[[int], Mod] | None] = {
    "full": None,
    "causal": _causal,
    "window1024": _window,
    "documents12": _documents,
    "prefix": _prefix,
}
SCORES: dict[str, Callable[[int], Mod]] = {"alibi": _alibi, "softcap": _softcap}

PREFILL = (
    GpuCase("full", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 128),
    GpuCase("full", 4, 16, 16, 8192, 8192, 64),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 64),
    GpuCase("causal", 4, 32, 8, 8192, 8192, 128),
    GpuCase("causal+alibi", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal+softcap", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal+softcap", 4, 16, 16, 8192, 8192, 64),
    GpuCase("window1024", 4, 16, 16, 8192, 8192, 128),
    GpuCase("documents12", 4, 16, 16, 8192, 8192, 128),
    GpuCase("prefix", 4, 16, 16, 8192, 8192, 128),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 96),
    GpuCase("causal", 4, 16, 16, 8192, 8192, 192),
    GpuCase("causal", 16, 16, 16, 2048, 2048, 128),
    GpuCase("documents12", 16, 16, 16, 2048, 2048, 128),
    GpuCase("causal", 1, 16, 16, 32768, 32768, 128),
)
DECODE = (
    GpuCase("full", 32, 32, 8, 1, 8192, 128),
    GpuCase("full", 8, 32, 8, 1, 32768, 128),
    GpuCase("full", 1, 32, 8, 1, 131072, 128),
    GpuCase("full", 32, 16, 16, 1, 8192, 64),
)


def _flex(module: Any, case: GpuCase, function: Callable[..., Any]) -> Attention:
    mask = case.mask_mod
    blocks = None
    if mask is not None:
        blocks = module.create_block_mask(mask, None, None, case.q_len, case.kv_len, device=DEVICE)
    arguments = {"score_mod": case.score_mod, "block_mask": blocks}
    return functools.partial(function, enable_gqa=case.heads != case.kv_heads, **arguments)


def _attnloom(case: GpuCase) -> Attention:
    return _flex(attnloom, case, attnloom.flex_attention)


def _torch_flex(case: GpuCase) -> Attention:
    torch.compiler.reset()  # one graph a case: no recompilation limit is met
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    return _flex(torch_flex, case, compiled)


def _sdpa(backend: SDPBackend, case: GpuCase) -> Attention | None:
    if case.variant not in ("full", "causal"):
        return None
    causal, gqa = case.variant == "causal", case.heads != case.kv_heads

    def attention(query, key, value):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=gqa
            )

    return attention


CONTENDERS: dict[str, Callable[[GpuCase], Attention | None]] = {
    "attnloom": _attnloom,
    "torch-flex": _torch_flex,
    "sdpa-flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
}


def gpu_suite(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """Forward and backward of PREFILL, then the host's time for a call."""
    for case in PREFILL:
        if keeps(case.name):
            yield from _forward_rows(case, "gpu", "forward")
            yield from _backward_rows(case)
    yield from _host_rows(keeps)


def decode_suite(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """DECODE: one query against a long cache."""
    for case in DECODE:
        if keeps("decode-" + case.name):
            yield from _forward_rows(case, "decode", "decode")


def _forward_rows(case: GpuCase, suite: str, phase: str) -> Iterator[Row]:
    inputs = case.inputs()

    def prepare(attention: Attention) -> Callable[[], Any]:
        return functools.partial(attention, *inputs)

    with torch.no_grad():
        yield from _rows(case, suite, phase, prepare)


def _backward_rows(case: GpuCase) -> Iterator[Row]:
    inputs = [x.requires_grad_() for x in case.inputs()]
    dout = torch.randn_like(inputs[0])

    def prepare(attention: Attention) -> Callable[[], Any]:
        out = attention(*inputs)
        return functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)

    yield from _rows(case, "gpu", "backward", prepare)


def _results(
    case: GpuCase, prepare: Callable[[Attention], Callable[[], Any]]
) -> tuple[dict[str, Callable[[], Any]], dict[str, torch.Tensor]]:
    """What to time, and the result of each; a peer that refuses the case is told and left out."""
    runs: dict[str, Callable[[], Any]] = {}
    results: dict[str, torch.Tensor] = {}
    for name, make in CONTENDERS.items():
        attention = make(case)
        if attention is None:
            continue
        try:
            runs[name] = prepare(attention)
            result = runs[name]()
        except RuntimeError as error:
            if name == "attnloom":
                raise
            print(f"{name} cannot run {case.name}: {error}"[:200], file=sys.stderr)
            runs.pop(name, None)
            continue
        parts = result if isinstance(result, tuple) else (result,)
        results[name] = torch.cat([part.flatten() for part in parts])
    return runs, results


def _host_rows(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """Microseconds until a call returns, kernels queued."""
    for variant in ("full", "causal", "causal+alibi"):
        case = GpuCase(variant, 1, 2, 2, 256, 256, 64)
        if not keeps(case.name):
            continue
        inputs = case.inputs()
        times = {}
        for name in ("attnloom", "torch-flex"):
            attention = CONTENDERS[name](case)
            assert attention is not None
            for _ in range(20):
                attention(*inputs)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(500):
                attention(*inputs)
            times[name] = (time.perf_counter() - start) / 500 * 1e6
            torch.cuda.synchronize()
        yield Row(
            "gpu", case.name, "overhead", "us", times["attnloom"], dtype="bf16", shape=case.shape,
            peer="torch-flex", theirs=times["torch-flex"], num_runs=500,
        )  # fmt: skip


def alternate(runs: dict[str, Callable[[], Any]]) -> dict[str, Sample]:
    """Device milliseconds of each run, taken in turn."""
    for run in runs.values():
        for _ in range(2):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: _summary(sorted(values)) for name, values in times.items()}


def _summary(ordered: list[float]) -> Sample:
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Sample(statistics.median(ordered), low, high, len(ordered))


def _require_agreement(case: GpuCase, outputs: dict[str, torch.Tensor]) -> None:
    """A speed counts only where every contender computes the same thing."""
    (ours, expected), *others = outputs.items()
    limit = _AGREEMENT * float(expected.float().abs().max())
    for name, output in others:
        error = float((output.float() - expected.float()).abs().max())
        if not error <= limit:
            raise RuntimeError(
                f"{case.name}: {ours} and {name} differ by {error:.3g} (at most {limit:.3g} is "
                "rounding), so one of them is wrong and neither is timed"
            )


def _density(case: GpuCase) -> float:
    mask = case.mask_mod
    if mask is None:
        return 1.0
    keys = torch.arange(case.kv_len, device=DEVICE)
    kept = sum(
        int(mask(0, 0, rows[:, None], keys[None, :]).sum())
        for rows in torch.arange(case.q_len, device=DEVICE).split(1024)
    )
    return kept / case.q_len / case.kv_len


def _rows(
    case: GpuCase,
    suite: str,
    phase: str,
    prepare: Callable[[Attention], Callable[[], Any]],
) -> Iterator[Row]:
    runs, results = _results(case, prepare)
    _require_agreement(case, results)
    del results
    samples = alternate(runs)
    ours, kept = samples["attnloom"], _density(case)
    for name, sample in samples.items():
        if name == "attnloom":
            continue
        yield Row(
            suite,
            case.name,
            phase,
            "ms",
            ours.median_ms,
            dtype="bf16",
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
