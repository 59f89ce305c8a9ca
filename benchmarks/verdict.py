"""Which of the project's targets a run reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import Row
from benchmarks.target import Target
from benchmarks.targets_cpu import CPU_TARGETS
from benchmarks.targets_gpu import GPU_TARGETS


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
    """One Verdict for each target of the suites that were run."""
    run = {row.suite for row in rows}
    verdicts = []
    for target in (t for t in (*CPU_TARGETS, *GPU_TARGETS) if run & set(t.suites)):
        chosen = target.rows(rows)
        verdicts.append(Verdict(target, target.measure(chosen) if chosen else None))
    return verdicts
