"""Command line of the benchmarks.

python -m benchmarks.run --suite cpu --suite mask --json benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import rows as rows_module
from benchmarks import tables
from benchmarks.cases import DTYPES
from benchmarks.contenders import CONTENDERS, DEFAULT_PEERS
from benchmarks.gpu import DisagreementError
from benchmarks.gpu_peers import GPU_PEERS
from benchmarks.rows import Row
from benchmarks.suites import SUITES, Selection
from benchmarks.verdict import judge


def main(argv: list[str] | None = None) -> int:
    """Run suites, print their tables, write JSON; 0 unless the arguments select nothing or
    contenders disagree."""
    args = _parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    selection = Selection(
        ours=args.ours,
        peers=tuple(p for p in args.peers or DEFAULT_PEERS if p in CONTENDERS and p != args.ours),
        dtypes=tuple(args.dtypes),
        cases=tuple(args.cases),
        all_sizes=args.all_sizes,
        budget_s=args.budget,
        gpu_peers=tuple(p for p in args.peers or GPU_PEERS if p in GPU_PEERS),
    )
    head = rows_module.header(args.ours)
    print(tables.machine_line(head), flush=True)
    rows: list[Row] = []
    start = time.perf_counter()
    disagreements: list[str] = []
    for suite in dict.fromkeys(args.suite):
        try:
            for row in SUITES[suite](selection):
                rows.append(row)
                print(_progress(row, time.perf_counter() - start), flush=True)
                if args.json:  # at every row: what was measured outlives a later failure
                    rows_module.write(args.json, head, rows)
        except DisagreementError as error:
            disagreements.append(str(error))
    if not rows and not disagreements:
        print(f"no case matches {' '.join(args.cases)}", file=sys.stderr)
        return 1
    for title, table in (
        ("All rows", tables.comparison_table(rows)),
        ("Geometric means", tables.mean_table(rows)),
        ("Targets", tables.verdict_table(judge(rows))),
        ("Losses", tables.losses(rows)),
    ):
        print(f"\n## {title}\n\n{table}")
    for said in disagreements:
        print(f"\n{said}", file=sys.stderr)
    return 1 if disagreements else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), required=True)
    peers = sorted({*CONTENDERS, *GPU_PEERS} - {"attnloom"})
    parser.add_argument("--peers", nargs="*", choices=peers, help="default: all that know a case")
    parser.add_argument("--ours", choices=sorted(CONTENDERS), default="attnloom")
    parser.add_argument("--cases", nargs="*", default=[], help="substrings of case names")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--all-sizes", action="store_true", help="both head sizes at every length")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each comparison")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


def _progress(row: Row, seconds: float) -> str:
    theirs = "" if row.theirs is None else f"  {row.peer} {row.theirs:.3f}"
    theirs += "" if row.ratio is None else f"  ratio {row.ratio:.2f}"
    label = f"{row.phase} {row.case} {row.dtype or ''}"
    return f"[{seconds:5.0f} s] {label:44} {row.ours:.3f} {row.unit}{theirs}"


if __name__ == "__main__":
    sys.exit(main())
