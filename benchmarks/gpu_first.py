"""First calls on a CUDA device, each in a process of its own: empty caches, then what that left.

python -m benchmarks.gpu_first CASE CONTENDER KIND  (one process; prints milliseconds)
python -m benchmarks.gpu_first CASE CONTENDER KIND 40  (and before them the 40 functions that took
    longest, which takes longer: cProfile's account of the calling thread)

KIND is `call` or `step`.

torch's own first use of the device, of a matrix product and of the autograd engine come before the
clock starts, and so does that of `backward(gradient)`: it imports sympy, once a process, which took
most of three seconds on a busy host, whoever's function was differentiated. What is timed ends when
the device is done; the mask is built before. The suite compiles our modules to bytecode first, as
pip does for all that it installs, torch and Triton among them. Its processes import what they need
beside each other, wait for a line to read before they use the device, since contexts of others slow
a first call down, and go on one after the other: of ours medians of three, since single ones differ
by a third on a host that others use too.
"""

from __future__ import annotations

import compileall
import contextlib
import cProfile
import itertools
import os
import pstats
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import attnloom
from benchmarks.gpu_cases import DEVICE, GpuCase
from benchmarks.gpu_peers import CONTENDERS
from benchmarks.rows import Row

SUITE = "gpu-compile"
CASES = {
    "softcap": GpuCase("causal+softcap", 2, 16, 16, 2048, 2048, 128),
    "alibi": GpuCase("causal+alibi", 2, 16, 16, 2048, 2048, 64),
}
_ROUNDS = 3
_READY, _TOOK = "ready", "ms: "
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "ATTNLOOM_CACHE_DIR": "attnloom",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def gpu_first_suite(keeps: Callable[[str], bool], peers: tuple[str, ...]) -> Iterator[Row]:
    """first_call and first_step with empty caches, warm_call and warm_step with filled ones."""
    for folder in attnloom.__path__:
        if not compileall.compile_dir(folder, quiet=2):
            raise RuntimeError(
                f"bytecode of {folder} cannot be written; first calls would read text"
            )
    rivals = tuple(peer for peer in ("triton", "torch-flex") if peer in peers)
    for key, case in CASES.items():
        if not keeps(case.name):
            continue
        kinds = "call", "step"
        times = _cold_and_warm(key, ("attnloom", *rivals), kinds)
        for kind in kinds:
            for i, phase in enumerate(("first", "warm")):
                ours = times["attnloom", kind][i]
                for peer in rivals or (None,):
                    yield Row(
                        SUITE, case.name, f"{phase}_{kind}", "ms", statistics.median(ours),
                        dtype="bf16", shape=case.shape, peer=peer,
                        theirs=statistics.median(times[peer, kind][i]) if peer else None,
                        ours_p10=min(ours), ours_p90=max(ours), num_runs=_ROUNDS,
                    )  # fmt: skip


def _cold_and_warm(
    key: str, contenders: Sequence[str], kinds: Sequence[str]
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Milliseconds of each contender and kind, with empty caches and with what those processes
    left."""
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = {
        place: ([], []) for place in itertools.product(contenders, kinds)
    }
    with contextlib.ExitStack() as stack:
        waiting = []
        for turn, kind in itertools.product(range(_ROUNDS), kinds):
            for name in contenders if turn == 0 else contenders[:1]:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                for i in range(2):
                    started = stack.enter_context(_started(folder, key, name, kind))
                    stack.callback(started.kill)  # if another one fails
                    waiting.append((times[name, kind][i], started))
        for _, started in waiting:
            _read_ready(started)
        for found, started in waiting:
            found.append(_timed(started))
    return times


def _started(folder: str, key: str, contender: str, kind: str) -> subprocess.Popen[str]:
    """A process that goes up to where it uses the device."""
    places = {name: str(Path(folder) / part) for name, part in _CACHES.items()}
    environment = os.environ | places | {"ATTNLOOM_QUICK_START": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu_first", key, contender, kind, "0", "wait"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def _read_ready(started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    said = []
    for line in started.stdout:
        if line.strip() == _READY:
            return
        said.append(line)
    raise RuntimeError(f"{started.args} failed:\n{''.join(said)[-2000:]}")


def _timed(started: subprocess.Popen[str]) -> float:
    said, _ = started.communicate("go\n")
    found = re.search(rf"^{_TOOK}(.*)$", said, re.MULTILINE)
    if started.returncode or found is None:
        raise RuntimeError(f"{started.args} failed:\n{said[-2000:]}")
    return float(found[1])


def main(key: str, contender: str, kind: str, functions: str = "0", wait: str = "") -> None:
    """Print the milliseconds of one first call or first training step; wait: for a line to read."""
    if wait:
        print(_READY, flush=True)
        sys.stdin.readline()
    case = CASES[key]
    inputs = [x.requires_grad_(kind == "step") for x in case.inputs()]
    square = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    product = square @ square
    product.backward(torch.ones_like(product))  # given a gradient, torch imports sympy
    attention = CONTENDERS[contender].prepare(case, None)
    assert attention is not None
    dout = torch.randn_like(inputs[0])
    torch.cuda.synchronize()
    profile = cProfile.Profile() if int(functions) else contextlib.nullcontext()
    start = time.perf_counter()
    with profile:
        out = attention(*inputs)
        if kind == "step":
            out.backward(dout)
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    if isinstance(profile, cProfile.Profile):
        table = pstats.Stats(profile)
        for order in ("cumulative", "tottime"):
            table.sort_stats(order).print_stats(int(functions))
    print(f"{_TOOK}{taken * 1e3}")


if __name__ == "__main__":
    main(*sys.argv[1:])
