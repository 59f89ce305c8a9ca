"""Decides which tiles of a traced mask are empty, partial or full, without the Q x KV mask.

1. Parts that depend on queries alone or keys alone become exact ranges (`summaries`).
2. Rectangles of tiles, coarse to fine, are decided by interval arithmetic (`ranges`): uniform
   regions cost one rectangle. Undecided ones split into FANOUT x FANOUT, depth first, so that few
   wait at a time.
3. Single tiles still undecided are looked at more closely (`leaves`).

Lanes beyond Q_LEN and KV_LEN do not count: a last tile that overhangs is full if all its real
scores are kept. (torch pads with False and calls it partial; for lengths that divide evenly the
two agree.)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnloom.ir.node import Axes, BoundProgram
from attnloom.masking.leaves import settle
from attnloom.masking.lists import BlockLists, Runs, TileGrid, lists_from_runs, share_equal
from attnloom.masking.ranges import Ranges, Rectangles
from attnloom.masking.summaries import FANOUT

_START_RECTANGLES = 4096
_BATCH_RECTANGLES = 1 << 16


def classify(
    bound: BoundProgram, grid: TileGrid, device: torch.device, separate_full: bool = True
) -> BlockLists:
    """Lists of the live tiles of a mask program.

    Args:
        bound: one BOOL output.
        grid: batch entries and heads as asked; those the program does not depend on, and those over
            which all lists are equal, are stored once.
        separate_full: False lists full tiles as partial.
    """
    grid = looked_at(bound, grid)
    search = _Search(bound, grid, device)
    if grid.num_rows and grid.num_kv_blocks:
        search.run()
    runs = search.runs()
    if not separate_full:
        runs = replace(runs, partial=torch.ones_like(runs.partial))
    return share_equal(lists_from_runs(grid, runs))


def looked_at(bound: BoundProgram, grid: TileGrid) -> TileGrid:
    """The grid with one batch entry or head where the mask program does not ask for it."""
    if grid.num_batches <= 1 and grid.num_heads <= 1:
        return grid
    axes = bound.program.axes[bound.program.outputs[0]]
    return replace(
        grid,
        num_batches=grid.num_batches if axes & Axes.B else min(grid.num_batches, 1),
        num_heads=grid.num_heads if axes & Axes.H else min(grid.num_heads, 1),
    )


class _Search:
    """One classification: rectangles still to decide go in, runs of live tiles come out."""

    def __init__(self, bound: BoundProgram, grid: TileGrid, device: torch.device) -> None:
        self.bound = bound
        self.grid = grid
        self.device = device
        self.found: list[Runs] = []

    def run(self) -> None:
        start = self.start()
        ranges = Ranges(self.bound, self.grid, start.level + 1, self.device)
        waiting = start.split(_BATCH_RECTANGLES)
        while waiting:
            rectangles = waiting.pop()
            surely, possibly = ranges.over(rectangles)
            self.note(rectangles[surely], partial=False)
            rest = rectangles[possibly & ~surely]
            if not len(rest):
                continue
            if rest.level:
                waiting += self.children(rest).split(_BATCH_RECTANGLES)
            elif ranges.are_exact:
                self.note(rest, partial=True)
            else:
                full, partial = settle(ranges, rest)
                self.note(full, partial=False)
                self.note(partial, partial=True)

    def runs(self) -> Runs:
        empty = torch.zeros(0, dtype=torch.int64, device=self.device)
        return Runs.join([Runs(empty, empty, empty, empty.bool()), *self.found])

    def start(self) -> Rectangles:
        """All of the mask, at the finest level that is still cheap to look at."""
        grid, level = self.grid, 0
        outer = grid.num_batches * grid.num_heads

        def across(blocks: int) -> int:
            return -(-blocks // FANOUT**level)

        rows, columns = grid.num_q_blocks, grid.num_kv_blocks
        while (
            across(rows) * across(columns) * outer > _START_RECTANGLES
            and max(across(rows), across(columns)) > 1
        ):
            level += 1
        b, h, row, column = torch.meshgrid(
            *(
                torch.arange(n, device=self.device)
                for n in (grid.num_batches, grid.num_heads, across(rows), across(columns))
            ),
            indexing="ij",
        )
        return Rectangles(level, b.flatten(), h.flatten(), row.flatten(), column.flatten())

    def children(self, parents: Rectangles) -> Rectangles:
        step = torch.arange(FANOUT, device=self.device)
        shape = (len(parents), FANOUT, FANOUT)
        row = (parents.row[:, None, None] * FANOUT + step[:, None]).expand(shape).flatten()
        column = (parents.column[:, None, None] * FANOUT + step).expand(shape).flatten()
        b, h = (x[:, None, None].expand(shape).flatten() for x in (parents.b, parents.h))
        out = Rectangles(parents.level - 1, b, h, row, column)
        scale = FANOUT**out.level
        inside = (row * scale < self.grid.num_q_blocks) & (column * scale < self.grid.num_kv_blocks)
        return out[inside]

    def note(self, rectangles: Rectangles, partial: bool) -> None:
        """Record live rectangles as one run in each of their rows of tiles."""
        if not len(rectangles):
            return
        grid, scale = self.grid, FANOUT**rectangles.level
        line = rectangles.row[:, None] * scale + torch.arange(scale, device=self.device)
        outer = rectangles.b * grid.num_heads + rectangles.h
        row = outer[:, None] * grid.num_q_blocks + line
        start = (rectangles.column * scale)[:, None].expand(row.shape)
        inside = line < grid.num_q_blocks
        start = start[inside]
        stop = (start + scale).clamp(max=grid.num_kv_blocks)
        kind = torch.full_like(start, partial, dtype=torch.bool)
        self.found.append(Runs(row[inside], start, stop, kind))
