"""A target: a bound on one figure of a run, and the figures there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rows import Row, geometric_mean

Measure = Callable[[Sequence[Row]], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure of a run.

    suites, phase, dtype, peers, case, except_case: which rows count; None and () match all, cases
        match as substrings.
    limit: the figure must be at least this if at_least, else at most.
    """

    text: str
    measure: Measure
    limit: float
    unit: str
    phase: str
    at_least: bool = False
    dtype: str | None = None
    peers: tuple[str, ...] = ()
    case: str = ""
    except_case: str = " "
    suites: tuple[str, ...] = ("cpu", "compile", "mask")

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that this target is about."""
        return [
            row
            for row in rows
            if row.phase == self.phase
            and row.suite in self.suites
            and self.dtype in (None, row.dtype)
            and (not self.peers or row.peer in self.peers)
            and self.case in row.case
            and self.except_case not in row.case
        ]


def ratios(rows: Sequence[Row]) -> list[float]:
    """Of the rows that have one."""
    return [row.ratio for row in rows if row.ratio is not None]


def mean_ratio(rows: Sequence[Row]) -> float:
    """Geometric mean."""
    return geometric_mean(ratios(rows))


def worst_ratio(rows: Sequence[Row]) -> float:
    """The least."""
    return min(ratios(rows))


def largest(rows: Sequence[Row]) -> float:
    """The largest value of ours."""
    return max(row.ours for row in rows)
