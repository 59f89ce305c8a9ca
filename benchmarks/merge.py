"""One file of results from several, of a suite whose cases were divided among devices.

python -m benchmarks.merge RESULT PART ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rows as rows_module
from benchmarks.rows import Row


def merge(parts: Sequence[tuple[dict[str, object], list[Row]]]) -> list[Row]:
    """Rows of all parts.

    Raises:
        ValueError: headers differ, or two parts hold the same row: they are not parts of one run.
    """
    heads = [head for head, _ in parts]
    for head in heads[1:]:
        differing = [name for name in head | heads[0] if head.get(name) != heads[0].get(name)]
        if differing:
            raise ValueError(f"the parts differ in {', '.join(differing)}: not one run")
    found: dict[tuple[str, str, str, str | None, str | None], Row] = {}
    for _, rows in parts:
        for row in rows:
            key = (row.suite, row.case, row.phase, row.dtype, row.peer)
            if key in found:
                raise ValueError(f"two parts hold {row.phase} of {row.case} against {row.peer}")
            found[key] = row
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args(argv)
    parts = [rows_module.read(path) for path in args.parts]
    rows_module.write(args.result, parts[0][0], merge(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
