"""Render committed results into Markdown documents, between markers.

    <!-- benchmarks:cpu.json:means -->
    (replaced)
    <!-- /benchmarks -->

python -m benchmarks.render README.md docs/design.md    (--check: fail if anything would change)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import neighbourhood, scaling, serving_table, tables
from benchmarks import rows as rows_module
from benchmarks.rows import Row
from benchmarks.verdict import judge

RESULTS = Path(__file__).parent / "results"
_MARKED = re.compile(
    r"(?P<open><!-- benchmarks:(?P<file>[\w.-]+):(?P<table>\w+) -->\n)"
    r".*?(?P<close><!-- /benchmarks -->)",
    re.DOTALL,
)
_NOT_MEASURED = (
    "No results are committed yet; `python -m benchmarks.{program} --json "
    "benchmarks/results/{file}` measures them."
)
_PROGRAMS = {"serving": "serving"}  # by table; others are suites of benchmarks.run

TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "all": tables.comparison_table,
    "means": tables.mean_table,
    "losses": tables.losses,
    "neighbourhood": neighbourhood.table,
    "scaling": scaling.table,
    "serving": serving_table.table,
    "targets": lambda rows: tables.verdict_table(judge(rows)),
}


def render(text: str, results: Path = RESULTS) -> str:
    """The document with every marked table replaced by what the results say now.

    Raises:
        KeyError: a marker names a table that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        if not (results / match["file"]).exists():
            program = _PROGRAMS.get(match["table"], "run")
            missing = _NOT_MEASURED.format(program=program, file=match["file"])
            return f"{match['open']}\n{missing}\n\n{match['close']}"
        head, rows = rows_module.read(results / match["file"])
        table = TABLES[match["table"]](rows)
        return f"{match['open']}\n{table}\n\n{tables.machine_line(head)}\n\n{match['close']}"

    return _MARKED.sub(replace, text)


def main(argv: list[str] | None = None) -> int:
    """Rewrite the documents named; with --check only compare, 1 if one is out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    stale = []
    for document in args.documents:
        text = document.read_text()
        fresh = render(text)
        if fresh == text:
            continue
        stale.append(document)
        if not args.check:
            document.write_text(fresh)
    for document in stale:
        print(f"{document}: {'out of date' if args.check else 'updated'}")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
