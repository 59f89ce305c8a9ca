"""Candidates (candidates.py) beside what `auto` runs, on a CUDA device: right first, then fast.

python -m benchmarks.gpu_candidates --json FILE [--only TEXT ...] [--jobs N] [--limit S]

Every candidate and case has a process of its own with a time limit: one that hangs or faults is a
row of the table, and the next one runs. Those found right are timed afterwards, by one process that
nothing runs beside. Errors are those of accuracy.py, the largest of the results', in parts per
million of the float64 oracle, which a candidate may miss by a tenth more than the kernels in use;
launches of many tiles a program must repeat bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnloom.backends.reference import reference_attention
from benchmarks import rows as rows_module
from benchmarks import tables
from benchmarks.accuracy import Tensors, relative_errors
from benchmarks.apart import run_apart
from benchmarks.gpu import alternate
from benchmarks.gpu_cases import DEVICE, GpuCase
from benchmarks.gpu_peers import Attention, attention_of

if TYPE_CHECKING:
    from benchmarks.candidates import Candidate

LIMIT_S = 90.0
# Of what is compared with the oracle: no multiple of a tile, and long enough for a causal mask to
# keep its blocks of 128 in the backward, which smaller tiles would compute (triton/refined.py); a
# table's rows are whole pieces of 16 bytes (gluon/pieces.py).
SMALL_LEN = 1520
_REPEATS = 5
_WORSE, _NOISE_PPM = 1.1, 50.0
_AGREEMENT = 3e-2  # of two bf16 results, over the largest element
_RESULT = "candidate result: "
_SELF = (sys.executable, "-m", "benchmarks.gpu_candidates")
_TIMED_S = 8.0  # allowed for one to be timed


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one candidate on one case. verdict: right, wrong, failed or hung; of the
    first alone there are times. detail: what was wrong, or the last line of a failure."""

    candidate: str
    case: str
    phase: str
    verdict: str
    detail: str = ""
    ours_ms: float | None = None
    seen_ms: float | None = None
    error_ppm: float | None = None
    seen_error_ppm: float | None = None

    @property
    def gain(self) -> float | None:
        """Time of the kernels in use over the candidate's."""
        return None if not self.ours_ms or self.seen_ms is None else self.seen_ms / self.ours_ms


def main(argv: list[str] | None = None) -> int:
    """Try candidates, print a table, write JSON; 0 if one of them was right."""
    args = _parser().parse_args(argv)
    if args.one:
        print(_RESULT + json.dumps(asdict(check_one(*args.one))))
        return 0
    if args.timed:
        for trial in json.load(sys.stdin):
            print(_RESULT + json.dumps(asdict(time_one(Trial(**trial)))), flush=True)
        return 0
    start = time.perf_counter()

    def checked(chosen: tuple[str, str, str]) -> Trial:
        trial = Trial(*chosen, "failed")
        left = args.budget - (time.perf_counter() - start)
        if left < args.limit / 3:
            return replace(trial, detail="no time was left for it")
        found = run_child([*_SELF, "--one", *chosen[:2]], trial, min(args.limit, left))
        print(f"[{time.perf_counter() - start:4.0f} s] {line_of(found)}", flush=True)
        return found

    def keep() -> None:  # what was found outlives a run that is cut short
        if args.json:
            write(args.json, trials)

    trials: list[Trial] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for trial in pool.map(checked, _chosen(args.only)):
            trials.append(trial)
            keep()
    for place, trial in timed(trials, args.limit):
        trials[place] = trial
        print(f"[{time.perf_counter() - start:4.0f} s] {line_of(trial)}", flush=True)
        keep()
    print("\n" + table_of(trials))
    return 0 if any(trial.verdict == "right" for trial in trials) else 1


def timed(trials: Sequence[Trial], limit: float) -> Iterator[tuple[int, Trial]]:
    """Those found right with their times, and their places. A process that ends early, or takes
    `limit` seconds and a few for each, costs the one at which it ended; the next goes on."""
    left = [place for place, trial in enumerate(trials) if trial.verdict == "right"]
    while left:
        asked = json.dumps([asdict(trials[place]) for place in left])
        ended = run_apart([*_SELF, "--timed"], limit + _TIMED_S * len(left), asked)
        done = _results(ended.text)
        yield from zip(left, done, strict=False)
        if len(done) < len(left):
            said = (ended.text.strip().splitlines() or ["nothing said"])[-1][:200]
            stopped = replace(trials[left[len(done)]], verdict="failed", detail=f"timed: {said}")
            yield left[len(done)], stopped
        left = left[len(done) + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_candidates")
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of candidates' or cases' names"
    )
    parser.add_argument("--jobs", type=int, default=1, help="candidates checked at once")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one process")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of all of them")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--one", nargs=2, metavar=("CANDIDATE", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chosen(only: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    from benchmarks.candidates import CANDIDATES

    for candidate in CANDIDATES:
        for case in candidate.cases:
            if not only or any(part in f"{candidate.name} {case.name}" for part in only):
                yield candidate.name, case.name, candidate.phase


def run_child(command: Sequence[str], trial: Trial, limit: float) -> Trial:
    """`trial` with what a process of at most `limit` seconds says; it may fault or hang."""
    ended = run_apart(command, limit)
    if ended.status is None:
        return replace(trial, verdict="hung", detail=f"nothing after {limit:.0f} s")
    for found in _results(ended.text):
        return found
    said = ended.text.strip().splitlines()
    return replace(trial, detail=(said or [f"exit status {ended.status}"])[-1][:200])


def _results(text: str) -> list[Trial]:
    lines = (line for line in text.splitlines() if line.startswith(_RESULT))
    return [Trial(**json.loads(line[len(_RESULT) :])) for line in lines]


def _found(name: str, case_name: str) -> tuple[Candidate, GpuCase]:
    from benchmarks.candidates import CANDIDATES

    candidate = next(c for c in CANDIDATES if c.name == name)
    return candidate, next(c for c in candidate.cases if c.name == case_name)


def check_one(name: str, case_name: str) -> Trial:
    """Whether one candidate is right on one case, in this process."""
    candidate, case = _found(name, case_name)
    trial = Trial(name, case_name, candidate.phase, "wrong")
    backward = candidate.phase == "backward"
    heads, kv_heads = case.heads // 4, case.kv_heads // 4
    q_len = min(case.q_len, SMALL_LEN)
    small = replace(case, batch=2, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=SMALL_LEN)
    run = _Runs(candidate.change, small, backward)
    oracle = run.oracle(small)
    error, seen = (max(relative_errors(found, oracle).values()) for found in run.both())
    trial = replace(trial, error_ppm=error, seen_error_ppm=seen)
    if not error <= _WORSE * seen + _NOISE_PPM:
        return replace(trial, detail="too far from the float64 oracle")
    many = replace(case, batch=16, q_len=q_len, kv_len=SMALL_LEN)
    if not _repeats(_Runs(candidate.change, many, backward)):
        return replace(trial, detail="launches of many tiles do not repeat")
    return replace(trial, verdict="right")


def time_one(trial: Trial) -> Trial:
    """A right one with its times, in this process; the whole case is compared before."""
    candidate, case = _found(trial.candidate, trial.case)
    full = _Runs(candidate.change, case, trial.phase == "backward")
    far = _disagreement(*full.both())
    if not far <= _AGREEMENT:
        return replace(
            trial, verdict="wrong", detail=f"differs from the kernels in use by {far:.2g}"
        )
    samples = alternate({"ours": full.ours, "seen": full.seen})
    ours, seen_ms = samples["ours"].median_ms, samples["seen"].median_ms
    return replace(trial, ours_ms=ours, seen_ms=seen_ms)


class _Runs:
    """The candidate and the kernels in use on one case: `ours` and `seen` are what is timed.

    Before a backward both have the forward that `auto` chooses. names: of the results; dq and what
    captured tensors get are sums in no fixed order, the others repeat.
    """

    def __init__(self, change: Any, case: GpuCase, backward: bool) -> None:
        self.learned = case.learned_table()
        self.inputs = [x.requires_grad_(backward) for x in case.inputs()]
        self.names = ("dq", "dk", "dv") if backward else ("out",)
        if backward and self.learned is not None:
            self.learned.requires_grad_()
            self.names += ("dlearned",)
        draw = torch.Generator(device=DEVICE).manual_seed(2)
        query = self.inputs[0]
        self.dout = torch.randn(query.shape, generator=draw, dtype=query.dtype, device=DEVICE)
        self.seen = self._start(attention_of("auto", case, self.learned), contextlib.nullcontext)
        ours = attention_of(change.backend, case, self.learned)
        self.ours = self._start(ours, change.installed)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return self.inputs if len(self.names) < 4 else [*self.inputs, self.learned]  # type: ignore[list-item]

    def _start(
        self, attention: Attention, installed: Callable[[], Any]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        query, key, value = self.inputs
        if not query.requires_grad:

            def forward() -> tuple[torch.Tensor, ...]:
                with installed():
                    return (attention(query, key, value),)

            return forward
        out = attention(query, key, value)

        def backward() -> tuple[torch.Tensor, ...]:
            with installed():
                return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)

        return backward

    def both(self) -> tuple[Tensors, Tensors]:
        ours, seen = self.ours(), self.seen()
        return dict(zip(self.names, ours, strict=True)), dict(zip(self.names, seen, strict=True))

    def oracle(self, case: GpuCase) -> Tensors:
        """The same in float64."""
        leaves = [x.detach().double().requires_grad_(x.requires_grad) for x in self.leaves]
        learned = leaves[3] if len(leaves) > 3 else self.learned
        query, key, value = leaves[:3]
        score_mod = case.score_mod(learned)
        out = reference_attention(query, key, value, score_mod, case.mask_mod).out
        if not leaves[0].requires_grad:
            return {"out": out}
        found = torch.autograd.grad(out, leaves, self.dout.double())
        return dict(zip(self.names, found, strict=True))


def _repeats(runs: _Runs) -> bool:
    """Whether every launch gives the same bits where sums have an order."""
    ordered = [i for i, name in enumerate(runs.names) if name not in ("dq", "dlearned")]
    first = [x.clone() for x in runs.ours()]
    for _ in range(_REPEATS):
        again = runs.ours()
        if not all(torch.equal(first[i], again[i]) for i in ordered):
            return False
    return True


def _disagreement(ours: Tensors, seen: Tensors) -> float:
    """Largest difference over the largest element; NaN where either has one."""
    return max(
        float((x.float() - seen[name].float()).abs().max() / seen[name].float().abs().max())
        for name, x in ours.items()
    )


def line_of(trial: Trial) -> str:
    times = "" if trial.gain is None else f" {trial.ours_ms:.3f} ms, gain {trial.gain:.3f}"
    return f"{trial.candidate}: {trial.case} {trial.phase} {trial.verdict}{times} {trial.detail}"


def table_of(trials: Sequence[Trial]) -> str:
    head = ("candidate", "case", "phase", "verdict", "ms", "in use", "gain", "ppm", "in use")
    body = [
        (
            trial.candidate,
            trial.case,
            trial.phase,
            f"{trial.verdict} {trial.detail}".strip(),
            *(
                "" if number is None else f"{number:.{digits}f}"
                for number, digits in (
                    (trial.ours_ms, 3),
                    (trial.seen_ms, 3),
                    (trial.gain, 3),
                    (trial.error_ppm, 0),
                    (trial.seen_error_ppm, 0),
                )
            ),
        )
        for trial in trials
    ]
    return tables.markdown(head, body)


def write(path: Path, trials: Sequence[Trial]) -> None:
    """Header and trials as a JSON list, one entry a line."""
    head = rows_module.header("candidates")
    entries = [asdict(trial) | {"gain": trial.gain} for trial in trials]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(e) for e in (head, *entries)) + "\n]\n")


if __name__ == "__main__":
    sys.exit(main())
