"""What passed on which device, as text to commit beside benchmark results (--numeric-log FILE).

The process that a user starts writes it, and not the workers among which pytest-xdist divides the
tests: at the first failure and each after it, every few seconds and at the end, so that a run that
is cut short leaves the names of what failed.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")
WRONG = ("failed", "error")
_SECONDS_BETWEEN = 5.0
_MOST_LINES = 8
_ROOT = Path(__file__).parents[2]  # paths are told from here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--numeric-log", metavar="FILE", type=Path, help="write there what passed on which device"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--numeric-log")
    is_worker = hasattr(config, "workerinput")
    if path is not None and not is_worker:
        config.pluginmanager.register(NumericLog(path, config))


class NumericLog:
    """The log of a run, as far as it went. A plugin of pytest."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path, self.config = path, config
        self.began = time.monotonic()
        self.written = -_SECONDS_BETWEEN
        self.stats: defaultdict[str, list[Any]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        self._add(found[0], report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add("error", report)

    def pytest_sessionfinish(self) -> None:
        self.write("in")

    def _add(self, outcome: str, report: Any) -> None:
        self.stats[outcome].append(report)
        if outcome in WRONG or time.monotonic() - self.written > _SECONDS_BETWEEN:
            self.write("so far, after")

    def write(self, when: str) -> None:
        """Write the log of what is known. when: in words, before the seconds."""
        self.written = time.monotonic()
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for outcome in OUTCOMES:
            for report in self.stats[outcome]:
                counts[report.nodeid.split("::")[0]][outcome] += 1
        total = sum(counts.values(), Counter())
        seconds = f"{self.written - self.began:.0f} s"
        lines = [_machine(), f"{_line(total)} {when} {seconds}", ""]
        lines += [f"{file}: {_line(counts[file])}" for file in sorted(counts)]
        for outcome in WRONG:
            lines += [f"\n{outcome}: {r.nodeid}\n{_reason(r)}" for r in self.stats[outcome]]
        skipped = Counter(_reason(r) for r in self.stats["skipped"])
        lines += [f"\nskipped {count}: {reason}" for reason, count in sorted(skipped.items())]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(lines) + "\n")


@functools.cache
def _machine() -> str:
    from benchmarks.rows import header
    from benchmarks.tables import machine_line

    return machine_line(header("numeric tests"))


def _line(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]) or "no test"


def _reason(report: Any) -> str:
    """Why a test failed or was skipped, in a few lines: of a long text the first and the end, where
    a traceback has its error."""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr)
    lines = text.replace(f"{_ROOT}{os.sep}", "").splitlines()
    return "\n".join(lines if len(lines) <= _MOST_LINES else [lines[0], "...", *lines[-6:]])
