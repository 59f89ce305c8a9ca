"""Markdown tables of a run, for the terminal and for documents alike."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Row, geometric_mean
from benchmarks.verdict import Verdict

_UNITS = {"mib": "MiB", "us": "µs"}


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as plain text too; numbers are right-aligned."""
    widths = [max(len(text) for text in column) for column in zip(columns, *lines, strict=True)]
    numeric = [
        bool(lines) and all(_is_number(line[i]) for line in lines) for i in range(len(columns))
    ]

    def draw(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "| " + " | ".join(placed) + " |"

    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, numeric, strict=True)
    ]
    return "\n".join([draw(columns), draw(rule), *map(draw, lines)])


def comparison_table(rows: Sequence[Row]) -> str:
    """Every row, one line each."""
    lines = [
        (
            row.suite,
            row.case,
            row.phase,
            row.dtype or "",
            "" if row.density is None else f"{row.density:.3f}",
            _quantity(row.ours, row.unit),
            _spread(row.ours_p10, row.ours_p90),
            row.peer or "",
            "" if row.theirs is None else _quantity(row.theirs, row.unit),
            _ratio(row),
        )
        for row in rows
    ]
    columns = "suite case phase dtype density ours p10-p90 peer theirs ratio".split()
    return markdown(columns, lines)


def mean_table(rows: Sequence[Row]) -> str:
    """Geometric mean, worst and best ratio of every (phase, dtype, peer) that was timed."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.ratio is not None and row.suite in ("cpu", "gpu", "decode", "scaling", "errors"):
            groups.setdefault((row.phase, row.dtype or "", row.peer or ""), []).append(row)
    lines = []
    for (phase, dtype, peer), members in groups.items():
        ratios = [row.ratio for row in members if row.ratio is not None]
        worst = min(members, key=lambda row: row.ratio or 0.0)
        lines.append(
            (
                phase,
                dtype,
                peer,
                str(len(members)),
                f"{geometric_mean(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
                worst.case,
            )
        )
    return markdown("phase dtype peer cases mean least most least_case".split(), lines)


def losses(rows: Sequence[Row]) -> str:
    """Every row where a peer is better than ours, beyond noise where that is known."""
    lost = [row for row in rows if row.lost]
    if not lost:
        return "No peer was better in any row."
    return comparison_table(sorted(lost, key=lambda row: row.ratio or 0.0))


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Targets with what was measured."""
    lines = []
    for verdict in verdicts:
        target = verdict.target
        sign = ">=" if target.at_least else "<="
        measured = "" if verdict.value is None else _quantity(verdict.value, target.unit)
        limit = f"{sign} {target.limit:g} {_UNITS.get(target.unit, target.unit)}"
        lines.append((target.text, limit, measured, verdict.word))
    return markdown(("target", "limit", "measured", "verdict"), lines)


def machine_line(head: dict[str, object]) -> str:
    """One sentence: where and when a run was made."""
    return (
        f"{head['cpu']} ({head['vector']}"
        f"{', bf16 dot products' if head['bf16_dot'] else ''}), {head['threads']} threads, "
        f"{head['system']}, {_gpu(head)}Python {head['python']}, torch {head['torch']}, "
        f"{head['compiler']}; commit {head['commit']}, {head['date']}."
    )


def _gpu(head: dict[str, object]) -> str:
    if "gpu" not in head:
        return ""
    return f"{head['gpu']}, CUDA {head['cuda']}, triton {head['triton']}, "


def _quantity(value: float, unit: str) -> str:
    digits = 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f} {_UNITS.get(unit, unit)}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    return f"{row.ratio:.2f}" + (f" ± {row.ratio_error:.3f}" if row.ratio_error else "")


def _spread(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3g}-{high:.3g}"


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit()
