"""First calls on a CUDA device, each in a process of its own: empty caches, then what that left.

python -m benchmarks.gpu_first CASE CONTENDER KIND  (one process; prints milliseconds)
python -m benchmarks.gpu_first CASE CONTENDER KIND 40  (and before them the 40 functions that took
    longest, which takes longer: cProfile's account of the calling thread)

KIND is `call` or `step`.

torch's own first use of the device, of a matrix product and of the autograd engine come before the
clock starts, and so does that of `backward(gradient)`: it imports sympy, once a process, which took
most of three seconds on a busy host, whoever's function was differentiated. What is timed ends when
the device is done; the mask is built before. The suite compiles our modules to bytecode first, as
pip does for all that it installs, torch and Triton among them.
"""

from __future__ import annotations

import compileall
import contextlib
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
        for kind in ("call", "step"):
            times = {name: _cold_and_warm(key, name, kind) for name in ("attnloom", *rivals)}
            for i, phase in enumerate(("first", "warm")):
                for peer in rivals:
                    yield Row(
                        SUITE, case.name, f"{phase}_{kind}", "ms", times["attnloom"][i],
                        dtype="bf16", shape=case.shape, peer=peer, theirs=times[peer][i],
                    )  # fmt: skip


def _cold_and_warm(key: str, contender: str, kind: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        places = {name: str(Path(folder) / part) for name, part in _CACHES.items()}
        environment = os.environ | places | {"ATTNLOOM_QUICK_START": "1"}
        command = [sys.executable, "-m", "benchmarks.gpu_first", key, contender, kind]
        cold, warm = (
            subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            for _ in range(2)
        )
    for done in (cold, warm):
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
    return float(cold.stdout.split()[-1]), float(warm.stdout.split()[-1])


def main(key: str, contender: str, kind: str, functions: str = "0") -> None:
    """Print the milliseconds of one first call or first training step."""
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
    print(taken * 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
