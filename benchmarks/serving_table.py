"""The table of benchmarks.serving: output tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.tables import markdown

_US = 1e6


def table(rows: Sequence[Row]) -> str:
    """A line for each case and peer: output tokens a second of ours and of theirs. Cases: requests,
    the least and most tokens of a prompt, those of an output."""
    lines = []
    for row in rows:
        assert row.theirs is not None and row.ratio is not None and row.unit == "us"
        rates = (f"{_US / us:,.0f}" for us in (row.ours, row.theirs))
        ratio = f"{row.ratio:.2f}"
        lines.append([row.phase, row.case, row.dtype or "", row.peer or "", *rates, ratio])
    columns = ["phase", "case", "dtype", "peer", "tokens/s", "peer's tokens/s", "ratio"]
    return markdown(columns, lines)
