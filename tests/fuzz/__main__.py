"""The long run: python -m tests.fuzz --programs 20000 [--kernel 0.05] [--minutes 25].

Prints each failing program, shrunk, and the counts at the end; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from attnloom.stats import compile_stats
from tests.fuzz.explore import CI_SHARES, explore

_PER_PART = 100  # a part ends with its first failing program


def main() -> int:
    """Read the arguments, run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=20000, help="how many to draw")
    parser.add_argument("--first-seed", type=int, default=1000, help="other seeds, other programs")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    for name, share in CI_SHARES.items():
        parser.add_argument(f"--{name}", type=float, default=share, help="share of the programs")
    options = parser.parse_args()
    shares = {name: getattr(options, name) for name in CI_SHARES}
    start, drawn, failures = time.monotonic(), 0, 0
    for part in range(-(-options.programs // _PER_PART)):
        if time.monotonic() - start > options.minutes * 60:
            break
        seed, count = options.first_seed + part, min(_PER_PART, options.programs - drawn)
        try:
            explore(shares, seed, count)
        except AssertionError as failure:
            failures += 1
            _say(f"FAILED seed {seed}: {failure}\n")
        drawn += count
        compiled = compile_stats().kernels_compiled
        seconds = time.monotonic() - start
        _say(f"{drawn} programs, {compiled} kernels, {failures} failures, {seconds:.0f} s")
    return int(failures > 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="attnloom-fuzz-") as folder:
        # Thousands of kernels that nobody will ask for again stay out of the user's cache.
        os.environ["ATTNLOOM_CACHE_DIR"] = folder
        sys.exit(main())
