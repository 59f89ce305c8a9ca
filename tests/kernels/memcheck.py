"""Small runs of every kernel under compute-sanitizer's memcheck, on a Hopper GPU.

python -m tests.kernels.memcheck [--log FILE] [--only NAME ...] [--limit S] [--jobs N]

Each run is a process with a time limit, N of them at a time; what the sanitizer says of all of
them goes to the log.
racecheck is of no use here: it does not follow an order that goes from a barrier of warps to an
mbarrier and on, and reports every buffer that is handed from warp to warp, Triton's own included.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import attnloom
from benchmarks.apart import run_apart

LIMIT_S = 150.0
_PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
_OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
_MODULE = "tests.kernels.memcheck"
_CLEAN = "ERROR SUMMARY: 0 errors"
GLUON: Any = {"backend": "gluon"}
LENGTH = 300  # no multiple of a tile, and rows of several documents in each


@dataclass(frozen=True)
class Finding:
    """verdict: clean, errors, failed or hung."""

    name: str
    verdict: str
    text: str


def sanitizer() -> str | None:
    """Where the tool is."""
    found = shutil.which("compute-sanitizer")
    return found or next((p for p in _PLACES if Path(p).exists()), None)


def check(name: str, limit: float = LIMIT_S) -> Finding:
    """One of RUNS under the sanitizer, in a process of its own."""
    tool = sanitizer()
    assert tool is not None
    return judge(name, [tool, *_OPTIONS, sys.executable, "-m", _MODULE, "--run", name], limit)


def judge(name: str, command: Sequence[str], limit: float) -> Finding:
    ended = run_apart(command, limit)
    if ended.status is None:
        return Finding(name, "hung", ended.text)
    if ended.status == 0 and _CLEAN in ended.text:
        return Finding(name, "clean", ended.text)
    return Finding(name, "errors" if "ERROR SUMMARY" in ended.text else "failed", ended.text)


def main(argv: list[str] | None = None) -> int:
    """Run all, print a line each; 0 if none found anything."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("--log", type=Path, default=Path("memcheck.log"), help="file to write")
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS), default=list(RUNS))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--run", choices=sorted(RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        RUNS[args.run]()
        torch.cuda.synchronize()
        return 0
    if sanitizer() is None:
        print("compute-sanitizer was not found", file=sys.stderr)
        return 2
    findings = []
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("w") as log, ThreadPoolExecutor(args.jobs) as pool:
        for finding in pool.map(lambda name: check(name, args.limit), args.only):
            findings.append(finding)
            print(f"{finding.name}: {finding.verdict}", flush=True)
            log.write(f"==== {finding.name}: {finding.verdict}\n{finding.text}\n")
            log.flush()
    return 0 if all(finding.verdict == "clean" for finding in findings) else 1


def _documents(length: int) -> Any:
    ids = torch.arange(length, device="cuda") // 170
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def _slopes(learned: bool) -> Any:
    slopes = torch.ones(2, device="cuda", requires_grad=learned)
    return lambda score, b, h, q, kv: score - slopes[h] * (q - kv)


def _attend(
    backend: str,
    backward: bool,
    learned: bool = False,
    q_len: int = LENGTH,
    widths: tuple[int, ...] = (64, 128),
) -> None:
    """Packed documents and a bias by distance, D of each width."""
    mask = attnloom.create_block_mask(
        _documents(LENGTH), None, None, q_len, LENGTH, device="cuda", BLOCK_SIZE=128
    )
    bias = _slopes(learned)
    for width in widths:
        inputs = [
            torch.randn(1, 2, n, width, device="cuda", dtype=torch.float16)
            for n in (q_len, LENGTH, LENGTH)
        ]
        inputs = [x.requires_grad_(backward) for x in inputs]
        for score_mod in (None, bias):
            out = attnloom.flex_attention(
                *inputs, score_mod, mask, kernel_options={"backend": backend}
            )
            results = [out]
            if backward:
                results = list(torch.autograd.grad(out, inputs, torch.ones_like(out)))
            assert all(x.isfinite().all() for x in results)


def _causal(length: int, widths: tuple[int, ...], heads: int = 2) -> None:
    """Forward and backward under a mask of edges alone, query heads in pairs."""
    mask = attnloom.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, length, length, device="cuda"
    )
    for width in widths:
        query, key, value = (
            torch.randn(1, n, length, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for n in (heads, heads // 2, heads // 2)
        )
        for blocks in (mask, None):
            out = attnloom.flex_attention(
                query, key, value, None, blocks, enable_gqa=True, kernel_options=GLUON
            )
            grads = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
            assert all(x.isfinite().all() for x in (out, *grads))


def _many_tiles(width: int) -> None:
    """A Gluon forward with more tiles than programs."""
    x = torch.randn(4, 16, 2 * LENGTH, width, device="cuda", dtype=torch.float16)
    mask = attnloom.create_block_mask(
        _documents(2 * LENGTH), None, None, 2 * LENGTH, 2 * LENGTH, device="cuda"
    )
    for blocks in (None, mask):
        out = attnloom.flex_attention(x, x, x, None, blocks, kernel_options=GLUON)
        assert out.isfinite().all()


def _pages() -> None:
    length, page, width = 256, 16, 64
    query = torch.randn(2, 4, 1, width, device="cuda", dtype=torch.float16)
    keys = torch.randn(2 * length // page, 2, page, width, device="cuda", dtype=torch.float16)
    lengths = torch.tensor([length, length - 7], dtype=torch.int32, device="cuda")
    pages = torch.randperm(keys.size(0), device="cuda").int().view(2, -1)
    table = attnloom.PageTable(lengths, None, pages, page, length)
    out = attnloom.flex_attention(query, attnloom.PagedKV(keys, keys, table), enable_gqa=True)
    assert out.isfinite().all()


RUNS: dict[str, Callable[[], None]] = {
    "gluon-forward": lambda: _attend("gluon", backward=False),
    "gluon-backward": lambda: _attend("gluon", backward=True),
    "gluon-backward-padded": lambda: _attend("gluon", backward=True, widths=(96,)),
    "gluon-captured": lambda: _attend("gluon", backward=True, learned=True),
    "gluon-many-tiles": lambda: _many_tiles(128),
    "gluon-many-tiles-64": lambda: _many_tiles(64),
    "gluon-panels": lambda: _many_tiles(192),
    "gluon-causal": lambda: _causal(LENGTH, (64, 96, 128)),
    "gluon-causal-wide": lambda: _causal(LENGTH, (160, 192, 256)),
    "gluon-long": lambda: _causal(4300, (64,)),
    "gluon-long-wide": lambda: _causal(2300, (96, 192)),
    "triton-forward": lambda: _attend("triton", backward=False),
    "triton-backward": lambda: _attend("triton", backward=True),
    "triton-decode": lambda: _attend("triton", backward=False, q_len=1),
    "triton-pages": _pages,
}

if __name__ == "__main__":
    sys.exit(main())
