"""The project's targets on a 2-core AVX-512 machine, each reached or missed by a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rows import Row, geometric_mean

Measure = Callable[[Sequence[Row]], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure of a run.

    phase, dtype, peer, case: which rows count; None matches all, case matches as a substring.
    limit: the figure must be at least this if at_least, else at most.
    """

    text: str
    measure: Measure
    limit: float
    unit: str
    phase: str
    at_least: bool = False
    dtype: str | None = None
    peer: str | None = None
    case: str = ""

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that this target is about."""
        return [
            row
            for row in rows
            if row.phase == self.phase
            and self.dtype in (None, row.dtype)
            and self.peer in (None, row.peer)
            and self.case in row.case
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """value is None where the run measured nothing of the kind."""

    target: Target
    value: float | None

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        reached = (
            self.value >= self.target.limit
            if self.target.at_least
            else self.value <= self.target.limit
        )
        return "reached" if reached else "missed"


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """One Verdict for each of TARGETS."""
    verdicts = []
    for target in TARGETS:
        chosen = target.rows(rows)
        verdicts.append(Verdict(target, target.measure(chosen) if chosen else None))
    return verdicts


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [row.ratio for row in rows if row.ratio is not None]


def _mean_ratio(rows: Sequence[Row]) -> float:
    return geometric_mean(_ratios(rows))


def _worst_ratio(rows: Sequence[Row]) -> float:
    return min(_ratios(rows))


def _largest(rows: Sequence[Row]) -> float:
    return max(row.ours for row in rows)


def _speedups() -> list[Target]:
    names = {"torch-flex": "compiled torch flex", "sdpa": "SDPA"}
    table = (
        # phase, peer, fp32 mean, bf16 mean, worst case of either
        ("forward", "torch-flex", 2.2, 5.0, 1.8),
        ("forward", "sdpa", 3.8, 6.0, 1.7),
        ("backward", "sdpa", 4.0, 5.0, None),
        ("decode", "torch-flex", 1.4, 9.0, None),
    )
    targets = []
    for phase, peer, fp32, bf16, worst in table:
        text = f"{phase} over {names[peer]}"
        for dtype, limit in (("fp32", fp32), ("bf16", bf16)):
            mean = f"{text}, {dtype}, geometric mean"
            targets.append(Target(mean, _mean_ratio, limit, "x", phase, True, dtype, peer))
        if worst is not None:
            targets.append(
                Target(f"{text}, worst case", _worst_ratio, worst, "x", phase, True, peer=peer)
            )
    return targets


TARGETS = (
    *_speedups(),
    Target("first call of a new variant", _largest, 1500, "ms", "first_call"),
    Target("first call in a new process, kernel on disk", _largest, 50, "ms", "warm_call"),
    Target("host overhead of a repeated call", _largest, 60, "us", "overhead"),
    Target(
        "extra memory at S=4096, forward and backward", _largest, 64, "mib", "memory", case="alibi"
    ),
    Target(
        "BlockMask of 2^20 tokens, window 1024",
        _largest,
        2000,
        "ms",
        "build",
        case="window1024-s1048576",
    ),
    Target(
        "BlockMask of 2^20 tokens, 1,000 documents",
        _largest,
        2000,
        "ms",
        "build",
        case="documents1000-s1048576",
    ),
    Target(
        "peak memory of the former", _largest, 1024, "mib", "memory", case="window1024-s1048576"
    ),
    Target(
        "peak memory of the latter", _largest, 1024, "mib", "memory", case="documents1000-s1048576"
    ),
)
