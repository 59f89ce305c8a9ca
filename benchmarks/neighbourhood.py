"""Live tiles of neighbourhood attention on square canvases, by the order of the tokens.

python -m benchmarks.neighbourhood [--json FILE]     (appendix A.1 of arXiv:2412.05496)

A row of the result has the tiles of one order as `ours` and those of row-major order as `peer`, so
that ratio is how many times fewer tiles are computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnloom import create_block_mask
from attnloom.mods import TokenOrder, morton_order, neighborhood, tiled_order
from benchmarks import rows as rows_module
from benchmarks.rows import Row
from benchmarks.tables import machine_line, markdown

CANVASES = (32, 64, 128, 256)
KERNELS = (5, 9, 13, 17, 25, 33)
BLOCK = 128
TILE = (8, 16)  # BLOCK tokens
ROW_MAJOR = "row-major"


def measure(canvases: Sequence[int] = CANVASES, kernels: Sequence[int] = KERNELS) -> Iterator[Row]:
    """Rows for each canvas, kernel that fits it, and order; row-major first."""
    for side in canvases:
        canvas = (side, side)
        orders = {"tiled": tiled_order(canvas, TILE), "morton": morton_order(canvas)}
        for kernel in kernels:
            if kernel > side:
                continue
            plain = _row(side, kernel, ROW_MAJOR, None, None)
            yield plain
            for name, order in orders.items():
                yield _row(side, kernel, name, order, plain.ours)


def _row(side: int, kernel: int, name: str, order: TokenOrder | None, plain: float | None) -> Row:
    S = side * side
    mod = neighborhood((side, side), kernel, order=order)
    mask = create_block_mask(mod, None, None, S, S, BLOCK_SIZE=BLOCK)
    return Row(
        suite="neighbourhood",
        case=f"c{side}-k{kernel}-{name}",
        phase="build",
        unit="tiles",
        ours=float(mask.lists().entries.numel()),
        shape=[1, 1, 1, S, S, 0],
        density=(kernel / side) ** 2,
        peer=None if plain is None else ROW_MAJOR,
        theirs=plain,
    )


def table(rows: Sequence[Row]) -> str:
    """One line a canvas and kernel: the share of live tiles in each order, and what it saves."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        canvas, kernel, name = row.case.split("-", 2)
        found.setdefault((int(canvas[1:]), int(kernel[1:])), {})[name] = row
    columns = [
        "canvas",
        "kernel",
        "scores",
        ROW_MAJOR,
        "tiled",
        "morton",
        "tiled saves",
        "morton saves",
    ]
    lines = []
    for (side, kernel), by_order in found.items():
        tiles = (-(-(side * side) // BLOCK)) ** 2
        plain, *others = (by_order[name] for name in (ROW_MAJOR, "tiled", "morton"))
        shares = [f"{100 * row.ours / tiles:.1f}%" for row in (plain, *others)]
        saved = [f"{row.ratio:.2f} x" for row in others]
        lines.append([f"{side} x {side}", str(kernel), f"{plain.density:.1%}", *shares, *saved])
    return markdown(columns, lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbourhood", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    head = rows_module.header("attnloom")
    print(machine_line(head), flush=True)
    rows = list(measure())
    print(table(rows))
    if args.json:
        rows_module.write(args.json, head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
