"""Output tokens a second of a decoder: our engine, SDPA over a padded cache, torch's flex over its
pages, and what the device would allow.

python -m benchmarks.serving [--shape 8b|small] [--requests 256] [--running 64] [--prompt 1024]
                             [--tokens 256] [--step-tokens 2048] [--peers sdpa,torch-flex]
                             [--limit 40] [--runs 1] [--json FILE]

Two cases, all contenders with the same random weights in one process, one after the other:

    requests    --requests of mixed lengths, prompts and outputs up to --prompt and --tokens and
                down to a sixteenth: the time of it all, prompts included, over the output tokens
    decode      32 sequences with prompts of half of --prompt and more and 64 tokens each: the
                time after the first token alone

A run comes after one that compiles; graphs are made before the clock starts. A peer is stopped
after --limit seconds and says so; its rate is that of the tokens it had by then. `bound`: prompts
at the rate of a large product of matrices, then steps at the rate at which a large tensor is read:
all weights once a step, and the keys and values that each token sees.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attnloom.serving import Decoder, ModelConfig, Rope, random_decoder
from benchmarks import rows as rows_module
from benchmarks.rows import Row
from benchmarks.serving_peers import PEERS, attnloom_engine, now
from benchmarks.serving_table import table
from benchmarks.serving_work import (
    Contender,
    Served,
    Speed,
    Workload,
    least_seconds,
    mixed,
    together,
)
from benchmarks.tables import machine_line

OURS = "attnloom"
SHAPES = {
    "8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_length=32768,
        windows=(None,) * 32,
        scale_dim=128,
        rope=Rope(500000.0),
    ),
    "small": ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_length=32768,
        windows=(None,) * 4,
        scale_dim=64,
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds an output token of each run; stopped_at: tokens, where time ran out."""

    us: list[float]
    stopped_at: int | None


def speed(model: Decoder) -> Speed:
    """The best of ten reads and of ten products."""
    cuda = model.device.type == "cuda"
    data = torch.ones((1 << 31 if cuda else 1 << 28) // 4, device=model.device)
    size = 8192 if cuda else 1024
    square = torch.ones(size, size, device=model.device, dtype=model.dtype)
    return Speed(
        data.nbytes / _best(model, lambda: data.sum()),
        2 * size**3 / _best(model, lambda: square @ square),
    )


def _best(model: Decoder, run: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(10):
        begin = now(model)
        run()
        best = min(best, now(model) - begin)
    return best


def measure(
    model: Decoder,
    work: Workload,
    phase: str,
    contenders: dict[str, Contender],
    args: argparse.Namespace,
) -> dict[str, Measured]:
    """What each contender that runs takes."""
    found: dict[str, Measured] = {}
    ours: list[list[int]] = []
    for name, prepare in contenders.items():
        begin = time.perf_counter()
        try:
            # Peers compile when they are made ready.
            runs = list(_runs(model, work, prepare, int(name == OURS), args))
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name} does not run: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        ours = ours or runs[0].tokens
        us = [_us(work, run, phase) for run in runs]
        done = min(run.num_tokens for run in runs)
        found[name] = Measured(us, done if done < sum(work.counts) else None)
        print(
            f"{phase} {name}: {statistics.median(us):.1f} us a token, {done} of "
            f"{sum(work.counts)} tokens, {_same(ours, runs[0].tokens)} as ours, "
            f"{time.perf_counter() - begin:.0f} s in all",
            file=sys.stderr,
            flush=True,
        )
    return found


def _runs(
    model: Decoder, work: Workload, prepare: Contender, num_warm: int, args: argparse.Namespace
) -> Iterator[Served]:
    """Some that compile what requests need, then --runs that count, none of which finds anything in
    a cache."""
    for i in range(num_warm + args.runs):
        run = prepare(model, work)
        served = run(args.limit)
        del run
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        if i >= num_warm:
            yield served


def _us(work: Workload, run: Served, phase: str) -> float:
    """Microseconds an output token; those of prompts are no output of decoding."""
    if phase == "requests":
        return run.seconds / run.num_tokens * 1e6
    return run.decode_seconds / (run.num_tokens - len(work.prompts)) * 1e6


def _same(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """How many tokens are the same: all in float32; in bfloat16 near ties part ways."""
    return sum(
        a == b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=False)
    )


def make_rows(
    model: Decoder, work: Workload, phase: str, found: dict[str, Measured], bound_us: float
) -> list[Row]:
    """A row for each peer and the bound."""
    config = model.config
    peers = {name: m for name, m in found.items() if name != OURS}
    peers["bound"] = Measured([bound_us], None)
    lengths = sorted(map(len, work.prompts))
    counts = sorted({min(work.counts), max(work.counts)})
    outputs = "-".join(map(str, counts))
    return [
        Row(
            suite="serving",
            case=f"r{len(lengths)}-p{lengths[0]}-{lengths[-1]}-t{outputs}",
            phase=phase,
            unit="us",
            ours=statistics.median(found[OURS].us),
            dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[model.dtype],
            shape=[
                work.running,
                config.num_heads,
                config.num_kv_heads,
                1,
                work.longest,
                config.head_dim,
            ],
            peer=name if m.stopped_at is None else f"{name}, {m.stopped_at} tokens",
            theirs=statistics.median(m.us),
            num_runs=len(found[OURS].us),
        )
        for name, m in peers.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = _arguments(argv)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    model = random_decoder(SHAPES[args.shape], device, dtype)
    model.kernels = {"auto": None, "on": True, "off": False}[args.kernels]
    vocab = model.config.vocab_size
    shown = speed(model)
    print(
        f"the device reads {shown.bytes_s / 1e9:,.0f} GB/s and multiplies at "
        f"{shown.flops_s / 1e12:,.1f} TFLOP/s",
        file=sys.stderr,
    )
    options = {} if args.ahead is None else {"run_ahead": args.ahead == "on"}
    contenders: dict[str, Contender] = {OURS: functools.partial(attnloom_engine, **options)}
    contenders |= {name: PEERS[name] for name in args.peers}
    longest = args.prompt, args.tokens
    works = {
        "requests": mixed(args.requests, longest, args.running, args.step_tokens, vocab),
        "decode": together(args.sequences, args.prompt, args.decode_tokens, vocab),
    }
    rows: list[Row] = []
    head = rows_module.header(OURS)
    for phase in args.phases:
        work = works[phase]
        found = measure(model, work, phase, contenders, args)
        total, decoding = least_seconds(model, work, shown)
        seconds = total if phase == "requests" else decoding
        num_tokens = sum(work.counts) - (0 if phase == "requests" else len(work.prompts))
        rows += make_rows(model, work, phase, found, seconds / num_tokens * 1e6)
        if args.json:  # a run that is stopped keeps what it had
            rows_module.write(args.json, head, rows)
    print(table(rows))
    print(machine_line(head))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    cuda = torch.cuda.is_available()

    def split(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser.add_argument("--shape", choices=list(SHAPES), default="8b" if cuda else "small")
    parser.add_argument("--phases", type=split, default=["requests", "decode"])
    parser.add_argument("--requests", type=int, default=256 if cuda else 16)
    parser.add_argument("--running", type=int, default=64 if cuda else 8)
    parser.add_argument("--step-tokens", type=int, default=2048 if cuda else 256)
    parser.add_argument("--prompt", type=int, default=1024 if cuda else 256)
    parser.add_argument("--tokens", type=int, default=256 if cuda else 32)
    parser.add_argument("--sequences", type=int, default=32 if cuda else 8)
    parser.add_argument("--decode-tokens", type=int, default=64 if cuda else 32)
    parser.add_argument("--peers", type=split, default=list(PEERS))
    parser.add_argument("--limit", type=float, default=40.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--kernels", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--ahead", choices=("on", "off"), help="default: the engine's")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
