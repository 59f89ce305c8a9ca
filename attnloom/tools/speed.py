"""What a mask saves, estimated from the tiles it keeps and the measured cost of a tile.

Three costs are timed on a small problem of the same kind, on this machine, now: a tile of plain
attention; a full tile, which runs the score_mod; a partial tile, which runs the mask_mod too. With
the numbers of full and partial tiles of the real mask they give its forward time. A partial tile is
timed with every score kept; one that keeps few may cost less. On a CPU one thread is timed, and all
threads are taken to share the work evenly. Left out: the fixed cost of a call, caches that a larger
problem no longer fits, and uneven load at the end.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnloom.api.attention import flex_attention
from attnloom.block_mask import BlockMask
from attnloom.masking import short_captures
from attnloom.masking.views import noop_mask
from attnloom.tools.setting import Mod, Setting

_SAMPLE_TOKENS = 1024
_SAMPLE_HEADS = 1
_RUNS = 5
_MEASURING_S = 1.0
HOW = (
    "forward = full scores x cost of a full tile + partial scores x cost of a partial tile (with "
    "every score kept); dense = all scores x cost of a plain tile (no mods, no mask, attnloom's "
    "own kernel). Costs: fastest of at least {runs} runs on query {query}, key {key}, on one "
    "thread, divided by {threads} threads."
)


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """All of it for the forward.

    plain_ns, full_ns, partial_ns: measured cost of one score in a tile of plain attention, in a
        full tile and in a partial tile (NaN where the problem has no such tiles).
    dense_ms: plain attention over every score. expected_ms: this problem.
    speedup: dense_ms / expected_ms; infinite for a mask that keeps nothing.
    how: the derivation in words.
    """

    plain_ns: float
    full_ns: float
    partial_ns: float
    dense_ms: float
    expected_ms: float
    speedup: float
    how: str


def estimate(
    setting: Setting,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    full_scores: int,
    partial_scores: int,
) -> SpeedEstimate:
    """Measure three small problems and scale them.

    Args:
        full_scores, partial_scores: scores in full and in partial tiles of the whole problem, over
            all batch entries and heads.
    """
    sample = setting.shrunk(_SAMPLE_TOKENS, _SAMPLE_HEADS)
    problems: dict[str, tuple[Mod | None, BlockMask | None]] = {"plain": (None, None)}
    if full_scores:
        problems["full"] = (score_mod, _all_tiles(sample, mask_mod, full=True))
    if partial_scores:
        problems["partial"] = (score_mod, _all_tiles(sample, mask_mod, full=False))
    threads = torch.get_num_threads() if setting.device.type == "cpu" else 1
    with _one_thread(setting.device):
        costs = {name: ns / threads for name, ns in _score_ns(sample, problems).items()}
    plain, full, partial = (costs.get(n, math.nan) for n in ("plain", "full", "partial"))
    expected_ns = sum(n * ns for n, ns in ((full_scores, full), (partial_scores, partial)) if n)
    dense_ns = setting.num_scores * plain
    q, k = sample.inputs()[:2]
    how = HOW.format(runs=_RUNS, query=list(q.shape), key=list(k.shape), threads=threads)
    speedup = dense_ns / expected_ns if expected_ns else float("inf")
    return SpeedEstimate(plain, full, partial, dense_ns / 1e6, expected_ns / 1e6, speedup, how)


def _all_tiles(sample: Setting, mask_mod: Mod | None, full: bool) -> BlockMask | None:
    """A mask in which every tile is full, or every tile partial."""
    if mask_mod is None:
        return None
    rows, columns = (
        -(-n // b) for n, b in zip((sample.q_len, sample.kv_len), sample.block_size, strict=True)
    )
    live = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=sample.device)
    return BlockMask.from_block_bool(
        live,
        torch.full_like(live, full),
        sample.block_size,
        noop_mask if full else functools.partial(_asked_and_kept, mask_mod),
        (sample.q_len, sample.kv_len),
    )


def _asked_and_kept(
    mask_mod: Mod, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    """The mask_mod's work, but True: kernels skip what a mask leaves nothing of."""
    return mask_mod(b, h, q_idx, kv_idx) | (q_idx >= 0)


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Threads that wait for each other on a busy machine were seen to cost up to 20 times more in
    one second than in the next; one thread soon gets a core to itself."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device.type == "cpu":
            torch.set_num_threads(threads)


def _score_ns(
    sample: Setting, problems: dict[str, tuple[Mod | None, BlockMask | None]]
) -> dict[str, float]:
    """Cost of a score of each problem. They take turns, and the fastest run counts: what else the
    machine does slows single runs down, often those of one problem more than those of another."""
    q, k, v = sample.inputs()
    gqa = sample.heads != sample.kv_heads
    best: dict[str, float] = {}
    turn, until = 0, math.inf
    while turn <= _RUNS or time.perf_counter() < until:
        for name, (score_mod, block_mask) in problems.items():
            with torch.no_grad(), short_captures.quietly():
                start = _now(sample.device)
                flex_attention(q, k, v, score_mod, block_mask, enable_gqa=gqa)
                seconds = _now(sample.device) - start
            if turn:  # the first compiles
                best[name] = min(seconds, best.get(name, math.inf))
        if not turn:
            until = time.perf_counter() + _MEASURING_S
        turn += 1
    return {name: seconds * 1e9 / sample.num_scores for name, seconds in best.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
