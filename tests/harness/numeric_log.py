"""What passed on which device, as text to commit beside benchmark results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import header
from benchmarks.tables import machine_line

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


def write(path: Path, stats: Mapping[str, Sequence[Any]], seconds: float) -> None:
    """Write the log.

    Args:
        stats: reports by outcome, as pytest's terminal reporter keeps them.
        seconds: of the whole run.
    """
    counts: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in stats.get(outcome, ()):
            file = report.nodeid.split("::")[0]
            counts.setdefault(file, Counter())[outcome] += 1
    total = sum(counts.values(), Counter())
    lines = [machine_line(header("numeric tests")), f"{_line(total)} in {seconds:.0f} s", ""]
    lines += [f"{file}: {_line(counts[file])}" for file in sorted(counts)]
    for outcome in ("failed", "error"):
        lines += [f"\n{outcome}: {r.nodeid}\n{_reason(r)}" for r in stats.get(outcome, ())]
    skipped = Counter(_reason(r) for r in stats.get("skipped", ()))
    lines += [f"\nskipped {count}: {reason}" for reason, count in sorted(skipped.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _line(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]) or "no test"


def _reason(report: Any) -> str:
    """Why a test failed or was skipped, in a few lines."""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return "\n".join(str(crash.message if crash else report.longrepr).splitlines()[:8])
