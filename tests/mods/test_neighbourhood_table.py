"""The program that counts live tiles of neighbourhood attention."""

from __future__ import annotations

import torch

from benchmarks import neighbourhood
from tests.mods.test_masks_grid import cells, line, morton_cells, tiled_cells


def live_tiles(places: list[tuple[int, ...]], side: int, kernel: int) -> int:
    """Tiles of 128 x 128 with a kept score, from sets of keys on each axis."""
    seen = torch.zeros(side, side, dtype=torch.bool)
    for i in range(side):
        seen[i, line(side, kernel, 1, False, i)] = True
    y, x = (torch.tensor([place[axis] for place in places]) for axis in (0, 1))
    kept = seen[y[:, None], y] & seen[x[:, None], x]
    count = len(places) // 128
    return int(kept.view(count, 128, count, 128).any(3).any(1).sum())


def test_counts() -> None:
    rows = list(neighbourhood.measure((32,), (5, 33)))
    assert [row.case for row in rows] == ["c32-k5-row-major", "c32-k5-tiled", "c32-k5-morton"]
    orders = (cells((32, 32)), tiled_cells((32, 32), (8, 16)), morton_cells((32, 32)))
    assert [row.ours for row in rows] == [live_tiles(order, 32, 5) for order in orders]
    text = neighbourhood.table(rows)
    assert "32 x 32" in text
    assert f"{rows[0].ours / rows[1].ours:.2f} x" in text
