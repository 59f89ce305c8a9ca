"""The table of the scaling suite: rates over lengths and head dimensions, and the best peer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.rows import Row
from benchmarks.tables import markdown
from benchmarks.targets_gpu import PEERS

# Matrix products of a phase over those of a forward.
_WORK = {"forward": 1.0, "backward": 2.5}


def table(rows: Sequence[Row]) -> str:
    """A line for each phase, group of query heads and length, a column for each D: TFLOP/s over
    kept scores, the best peer's time over ours, and who that is."""
    cells: dict[tuple[str, int, int], dict[int, list[Row]]] = {}
    for row in rows:
        if row.suite == "scaling" and row.shape is not None and row.peer in PEERS:
            _, heads, kv_heads, _, length, dim = row.shape
            line = cells.setdefault((row.phase, heads // kv_heads, length), {})
            line.setdefault(dim, []).append(row)
    if not cells:
        return "No row of the scaling suite."
    dims = sorted({dim for line in cells.values() for dim in line})
    order = sorted(cells, key=lambda key: (list(_WORK).index(key[0]), *key[1:]))
    lines = [
        [phase, str(group), str(length), *[_cell(cells[phase, group, length], d) for d in dims]]
        for phase, group, length in order
    ]
    return markdown(["phase", "group", "S", *[f"D={dim}" for dim in dims]], lines)


def _cell(line: dict[int, list[Row]], dim: int) -> str:
    if dim not in line:
        return "-"
    best = min(line[dim], key=lambda row: row.theirs or math.inf)
    assert best.shape is not None and best.density is not None and best.ratio is not None
    batch, heads, _, q_len, kv_len, _ = best.shape
    flops = 4 * batch * heads * q_len * kv_len * dim * best.density * _WORK[best.phase]
    return f"{flops / best.ours * 1e-9:.0f} ({best.ratio:.2f} {best.peer})"
