"""Compile what suites on a Hopper GPU will ask for, in many processes and without the GPU.

python -m benchmarks.prewarm [--suite NAME ...] [--jobs N]

A first call compiles its kernels one after the other, seconds each; here all of a suite's are
compiled side by side into Triton's own cache (TRITON_CACHE_DIR), where the suite then finds them.
Calls are made as a suite makes them, through the public functions, on tensors of the CPU that
nobody fills: a kernel is compiled where it would be started.

Triton's cache is keyed by its own files (the compiler's library, so that builds for two versions of
Python differ), the assembler's version, the target and the kernel's source: `--key` prints what a
cache from another machine must agree on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from benchmarks import gpu_cases
from benchmarks.gpu_cases import DECODE, PREFILL, SCALING, GpuCase

ARCH = 90
SUITES = ("gpu", "decode", "scaling", "candidates")
BACKENDS = ("auto", "triton")


@dataclass(frozen=True, slots=True)
class Job:
    """One call. how: a backend, or the number of a candidate."""

    case: GpuCase
    phase: str
    how: str | int


def jobs_of(suite: str, backends: Sequence[str] = BACKENDS) -> list[Job]:
    """The calls of a suite; those that compile longest first."""
    if suite == "candidates":
        from benchmarks.candidates import CANDIDATES

        return [
            Job(case, candidate.phase, number)
            for number, candidate in enumerate(CANDIDATES)
            for case in candidate.cases
        ]
    cases = {"gpu": PREFILL, "decode": DECODE, "scaling": SCALING}[suite]
    phases = ("forward",) if suite == "decode" else ("backward", "forward")
    return [Job(case, phase, backend) for phase in phases for backend in backends for case in cases]


def main(argv: list[str] | None = None) -> int:
    """Compile in processes, print how long it took; 0 if every call got through."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prewarm")
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all but scaling")
    parser.add_argument("--cases", nargs="*", default=[], help="substrings of case names")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument(
        "--key", action="store_true", help="print what caches are keyed by, no more"
    )
    args = parser.parse_args(argv)
    if args.key:
        print(environment_key())
        return 0
    suites = args.suite or ("gpu", "decode", "candidates")
    jobs = [job for suite in suites for job in jobs_of(suite, args.backends)]
    jobs = [j for j in jobs if not args.cases or any(part in j.case.name for part in args.cases)]
    return report(run_jobs(dict.fromkeys(jobs), args.jobs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did: kernels that it compiled and found compiled, and an error if it failed.
    seconds: of processors, the assembler's processes included."""

    job: Job
    seconds: float
    compiled: int
    found: int
    error: str = ""


def report(outcomes: Iterator[Outcome]) -> int:
    start = time.perf_counter()
    done: list[Outcome] = []
    for outcome in outcomes:
        done.append(outcome)
        if outcome.error:
            print(f"{outcome.job}: {outcome.error}", file=sys.stderr, flush=True)
    compiled = sum(o.compiled for o in done)
    print(
        f"{len(done)} calls: {compiled} kernels compiled, {sum(o.found for o in done)} found, "
        f"{sum(o.seconds for o in done):.0f} s of processors in {time.perf_counter() - start:.0f} s"
    )
    return 1 if any(o.error for o in done) else 0


def run_jobs(jobs: Sequence[Job] | dict[Job, None], processes: int) -> Iterator[Outcome]:
    """Outcomes as they come; processes are fresh, so that nothing of this one is patched."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        processes, context, torch.set_num_threads, (1,)
    ) as pool:
        waiting = [pool.submit(compile_job, job) for job in jobs]
        for future in concurrent.futures.as_completed(waiting):
            yield future.result()


def compile_job(job: Job) -> Outcome:
    """In a process of its own: what a device would be asked to run is compiled."""
    from attnloom import compile_stats

    before, start = compile_stats(), sum(os.times()[:4])
    error = ""
    try:
        with without_a_device():
            _call(job)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:300]
    now = compile_stats()
    compiled = now.kernels_compiled - before.kernels_compiled
    found = now.kernels_loaded - before.kernels_loaded - compiled
    return Outcome(job, sum(os.times()[:4]) - start, compiled, found, error)


def _call(job: Job) -> None:
    """The call of a job, as benchmarks make it."""
    from benchmarks.candidates import CANDIDATES
    from benchmarks.gpu_peers import attention_of

    case = job.case
    backend, installed = job.how, contextlib.nullcontext
    if isinstance(job.how, int):
        change = CANDIDATES[job.how].change
        backend, installed = change.backend, change.installed
    learned = case.learned_table()
    if learned is not None:
        learned.requires_grad_(job.phase == "backward")
    inputs = [x.requires_grad_(job.phase == "backward") for x in _unfilled(case)]
    attention = attention_of(str(backend), case, learned)
    if job.phase != "backward":
        with installed():
            attention(*inputs)
        return
    out = attention(*inputs)
    if learned is not None:
        inputs.append(learned)
    with installed():
        torch.autograd.grad(out, inputs, torch.empty_like(out))


def _unfilled(case: GpuCase) -> list[torch.Tensor]:
    """Inputs of a case; memory that is never written takes no room."""
    sizes = (
        (case.batch, case.heads, case.q_len, case.head_dim),
        *[(case.batch, case.kv_heads, case.kv_len, case.head_dim)] * 2,
    )
    return [torch.empty(size, dtype=torch.bfloat16) for size in sizes]


@contextlib.contextmanager
def without_a_device() -> Iterator[None]:
    """Inside, tensors of the CPU count as those of a Hopper GPU, and kernels are compiled for it
    where they would be started."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from attnloom.backends.gluon import short_rows
    from attnloom.backends.triton import launcher
    from benchmarks.pretended import planned_for_it

    with (
        planned_for_it(),
        mock.patch.object(driver, "_active", _Driver(GPUTarget("cuda", ARCH, 32))),
        mock.patch.object(gpu_cases, "DEVICE", "cpu"),
        mock.patch("benchmarks.gpu_peers.DEVICE", "cpu"),
        mock.patch.object(launcher.Launcher, "__call__", _compile),
        mock.patch.object(short_rows, "refined", _refined),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
    ):
        yield


def _refined(call: Any) -> Any:
    """As backends/triton/refined.py, whose blocks the CPU can find as well."""
    from attnloom.backends.triton.refined import worth_refining

    found = worth_refining(call.mask, call.blocks)
    return call if found is None else replace(call, blocks=found)


class _Driver:
    """What Triton asks of a device in order to compile for it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(launch: Any, aligned: bool, *args: object) -> None:
    """In place of Launcher.__call__."""
    from triton.runtime.errors import OutOfResources

    from attnloom.backends.triton.resources import spills_of
    from benchmarks.pretended import H200

    made = launch.compile(args)
    if made.metadata.shared > H200.shared_bytes:
        raise OutOfResources(made.metadata.shared, H200.shared_bytes, "shared memory")
    launch.spills = spills_of(made.asm["cubin"])


def environment_key() -> str:
    """What a compiled kernel is found by, but for its source and configuration."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    parts = triton_key(), make_backend(GPUTarget("cuda", ARCH, 32)).hash()
    digest = hashlib.sha256("-".join(parts).encode()).hexdigest()[:16]
    return f"{digest} (triton {parts[0].split('-')[0][:5]}, assembler and target {parts[1]})"


if __name__ == "__main__":
    sys.exit(main())
