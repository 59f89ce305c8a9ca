"""Run once, side by side on a CUDA device, what a suite will time: that fills all caches.

python -m benchmarks.rehearse --suite gpu --peers triton torch-flex sdpa-cudnn fa4 [--jobs N]

The suite itself compiles one contender after the other: torch flex twice a case, 5 to 8 seconds
each, FlashAttention 4 once a form. Peers find what was compiled here in caches of their own, whose
folders must be the suite's (TORCHINDUCTOR_CACHE_DIR, FLASH_ATTENTION_CUTE_DSL_CACHE_DIR with
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, TRITON_CACHE_DIR). H200, 16 cores, 18 cases, the same
calls in a process each: 85 s beside other work, and 54 s for the suite behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.gpu_cases import PREFILL, SCALING, GpuCase
from benchmarks.gpu_peers import GPU_PEERS

SUITES = {"gpu": PREFILL, "scaling": SCALING}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every process came through; a contender that fails is told and left to the suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearse")
    parser.add_argument("--suite", choices=sorted(SUITES), default="gpu")
    parser.add_argument("--peers", nargs="*", choices=sorted(GPU_PEERS), default=list(GPU_PEERS))
    parser.add_argument("--cases", nargs="*", default=[], help="substrings of case names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--part", type=int, help="run this process's share here")
    args = parser.parse_args(argv)
    cases = [
        c for c in SUITES[args.suite] if not args.cases or any(p in c.name for p in args.cases)
    ]
    if not cases:
        print(f"no case matches {' '.join(args.cases)}", file=sys.stderr)
        return 1
    if args.part is not None:
        for line in rehearsed(cases[args.part :: args.jobs], args.suite, args.peers):
            print(line, flush=True)
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "benchmarks.rehearse", *given, "--jobs", str(args.jobs)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    parts = range(min(args.jobs, len(cases)))
    started = [subprocess.Popen([*command, "--part", str(part)], env=alone) for part in parts]
    return max(process.wait() != 0 for process in started)


def rehearsed(cases: Sequence[GpuCase], suite: str, peers: Sequence[str]) -> Iterator[str]:
    """A line for each phase of each case: who ran, and for how long."""
    import torch

    from benchmarks import gpu
    from benchmarks.gpu_peers import taking_part

    peers = taking_part(peers)
    for case in cases:
        start = time.perf_counter()
        for phase, who in gpu.rehearse(suite, case, peers):
            yield f"{phase} {case.name}: {', '.join(who)}, {time.perf_counter() - start:.0f} s"
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
