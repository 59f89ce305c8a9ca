"""create_block_mask on a CUDA device: wall time of a repeated call, memory, the first call.

A call counts until the device is done. Peers are torch's function as it is and, for one case, under
torch.compile, in one process, in turn; where torch runs out of memory the row is ours alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

import attnloom
from benchmarks.gpu_cases import DEVICE, MASKS
from benchmarks.rows import Row
from benchmarks.timing import Sample, summarise

SUITE = "gpu-mask"
KINDS = ("causal", "window1024", "documents12")
LENGTHS = (8192, 32768, 131072)
# It compiles for some 20 seconds each; other masks differ by what little they compute.
_COMPILED = ("causal-s131072",)
_FIRST = ("documents12",)
_RUNS = 30
_MIB = 1 << 20
_FIRST_CALL = """
import time, torch, attnloom
from benchmarks.gpu_cases import DEVICE, MASKS
mask_mod, length = MASKS[{kind!r}]({length}), {length}
torch.zeros(1, device=DEVICE) + 1
torch.cuda.synchronize()
start = time.perf_counter()
attnloom.create_block_mask(mask_mod, None, None, length, length, device=DEVICE)
torch.cuda.synchronize()
print((time.perf_counter() - start) * 1e3)
"""

Build = Callable[[], Any]


def gpu_mask_suite(keeps: Callable[[str], bool]) -> Iterator[Row]:
    """Every kind of mask at every length; then the first call of a process without kernels."""
    for kind in KINDS:
        for length in LENGTHS:
            if keeps(f"{kind}-s{length}"):
                yield from _builds(kind, length)
    for kind in _FIRST:
        name = f"{kind}-s{LENGTHS[-1]}"
        if keeps(name):
            for phase, value in zip(("first_call", "warm_call"), _first(kind), strict=True):
                yield Row(SUITE, name, phase, "ms", value, shape=_shape(LENGTHS[-1]))


def _builds(kind: str, length: int) -> Iterator[Row]:
    make = MASKS[kind]
    assert make is not None
    arguments = (make(length), None, None, length, length, DEVICE)
    case = f"{kind}-s{length}"
    builds: dict[str, Build] = {
        "attnloom": lambda: attnloom.create_block_mask(*arguments),
        "torch": lambda: torch_flex.create_block_mask(*arguments),
    }
    if case in _COMPILED:
        compiled = torch.compile(torch_flex.create_block_mask, dynamic=False)
        builds["torch-compiled"] = lambda: compiled(*arguments)
    memory = {name: _extra_memory(build) for name, build in builds.items()}
    fitting = {name: build for name, build in builds.items() if memory[name] is not None}
    _require_agreement(case, fitting)
    samples = _alternate(fitting)
    ours = samples.pop("attnloom")
    spread = {"ours_p10": ours.p10_ms, "ours_p90": ours.p90_ms, "num_runs": ours.num_runs}
    rows = Row(SUITE, case, "build", "ms", ours.median_ms, shape=_shape(length), **spread)
    yield from _with_peers(rows, {name: sample.median_ms for name, sample in samples.items()})
    used = memory.pop("attnloom")
    assert used is not None
    row = Row(SUITE, case, "memory", "mib", used, shape=_shape(length))
    yield from _with_peers(row, {n: value for n, value in memory.items() if value is not None})


def _with_peers(row: Row, theirs: dict[str, float]) -> Iterator[Row]:
    for peer, value in theirs.items():
        yield replace(row, peer=peer, theirs=value)
    if not theirs:
        yield row


def _shape(length: int) -> list[int]:
    return [1, 1, 1, length, length, 0]


def _extra_memory(build: Build) -> float | None:
    """MiB above what was there before, result included; None where memory runs out."""
    try:
        build()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        build()
        return (torch.cuda.max_memory_allocated() - before) / _MIB
    except RuntimeError as error:
        print(f"left out: {error}"[:160], file=sys.stderr)
        return None
    finally:
        torch.cuda.empty_cache()


def _require_agreement(case: str, builds: dict[str, Build]) -> None:
    """All have the same numbers of partial and full tiles in every row."""
    ours, *others = (
        (mask.kv_num_blocks, mask.full_kv_num_blocks) for mask in (b() for b in builds.values())
    )
    for other in others:
        if not all(torch.equal(x, y) for x, y in zip(ours, other, strict=True)):
            raise RuntimeError(f"{case}: {', '.join(builds)} disagree, so none of them is timed")


def _alternate(builds: dict[str, Build]) -> dict[str, Sample]:
    times: dict[str, list[float]] = {name: [] for name in builds}
    for build in builds.values():
        for _ in range(3):
            build()
    for _ in range(_RUNS):
        for name, build in builds.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            build()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: summarise(values) for name, values in times.items()}


def _first(kind: str) -> tuple[float, float]:
    """Milliseconds of the first call in a process, with empty caches and with filled ones."""
    code = _FIRST_CALL.format(kind=kind, length=LENGTHS[-1])
    with tempfile.TemporaryDirectory() as cache:
        places = {"TRITON_CACHE_DIR": cache, "ATTNLOOM_CACHE_DIR": cache}
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", code],
                    env=os.environ | places,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(2)
        ]
    return times[0], times[1]
