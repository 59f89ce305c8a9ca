"""Decides which tiles of a traced mask are empty, partial or full, without the Q x KV mask.

1. Parts that depend on queries alone or keys alone become exact ranges (`summaries`).
2. Rectangles of tiles, coarse to fine, are decided by interval arithmetic: uniform regions cost one
   rectangle. Undecided ones split into FANOUT x FANOUT, depth first, so that few wait at a time.
3. A single tile still undecided is partial if a few sampled scores differ; otherwise it is
   evaluated exactly, a bounded number of scores at a time.

Lanes beyond Q_LEN and KV_LEN do not count: a last tile that overhangs is full if all its real
scores are kept. (torch pads with False and calls it partial; for lengths that divide evenly the
two agree.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram
from attnloom.ir.passes.bounds import bounds
from attnloom.masking.lists import BlockLists, Runs, TileGrid, lists_from_runs, share_equal
from attnloom.masking.summaries import FANOUT, Pyramid, summarise

_START_RECTANGLES = 4096
_BATCH_RECTANGLES = 1 << 16
_BATCH_LANES = 1 << 20
_SAMPLES = (2, 8)


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Rectangles of FANOUT ** level tiles a side. b, h, row, column: [n] int64."""

    level: int
    b: torch.Tensor
    h: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    def __len__(self) -> int:
        return self.b.numel()

    def __getitem__(self, index: slice | torch.Tensor) -> Rectangles:
        return Rectangles(
            self.level, self.b[index], self.h[index], self.row[index], self.column[index]
        )

    def batches(self) -> list[Rectangles]:
        return [self[i : i + _BATCH_RECTANGLES] for i in range(0, len(self), _BATCH_RECTANGLES)]


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
    axes = bound.program.axes[bound.program.outputs[0]]
    grid = replace(
        grid,
        num_batches=grid.num_batches if axes & Axes.B else min(grid.num_batches, 1),
        num_heads=grid.num_heads if axes & Axes.H else min(grid.num_heads, 1),
    )
    search = _Search(bound, grid, device)
    if grid.num_rows and grid.num_kv_blocks:
        search.run()
    runs = search.runs()
    if not separate_full:
        runs = replace(runs, partial=torch.ones_like(runs.partial))
    return share_equal(lists_from_runs(grid, runs))


class _Search:
    """One classification: rectangles still to decide go in, runs of live tiles come out."""

    def __init__(self, bound: BoundProgram, grid: TileGrid, device: torch.device) -> None:
        self.bound = bound
        self.grid = grid
        self.device = device
        self.found: list[Runs] = []
        self.pyramids: dict[int, Pyramid] = {}

    def run(self) -> None:
        start = self.start()
        self.pyramids = summarise(self.bound, self.grid, start.level + 1, self.device)
        waiting = start.batches()
        while waiting:
            rectangles = waiting.pop()
            surely, possibly = self.range_of(rectangles)
            self.note(rectangles[surely], partial=False)
            rest = rectangles[possibly & ~surely]
            if not len(rest):
                continue
            if rest.level:
                waiting += self.children(rest).batches()
            elif self.bound.program.outputs[0] in self.pyramids:
                self.note(rest, partial=True)  # its range over a tile is exact
            else:
                self.settle(rest)

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

    def spans(self, rectangles: Rectangles) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """First and last position of each input over each rectangle."""
        grid, scale = self.grid, FANOUT**rectangles.level
        q, kv = rectangles.row * (grid.q_block * scale), rectangles.column * (grid.kv_block * scale)
        return {
            "b": (rectangles.b, rectangles.b),
            "h": (rectangles.h, rectangles.h),
            "q": (q, (q + (grid.q_block * scale - 1)).clamp(max=grid.q_len - 1)),
            "kv": (kv, (kv + (grid.kv_block * scale - 1)).clamp(max=grid.kv_len - 1)),
        }

    def range_of(self, rectangles: Rectangles) -> tuple[torch.Tensor, torch.Tensor]:
        """([n], [n]) bool: all scores are surely kept; some score is possibly kept."""
        known = {
            index: pyramid.at(
                rectangles.level,
                rectangles.b,
                rectangles.h,
                rectangles.row if pyramid.side == "q" else rectangles.column,
            )
            for index, pyramid in self.pyramids.items()
        }
        lo, hi = bounds(self.bound, self.spans(rectangles), known)
        shape = rectangles.b.shape
        return lo.expand(shape), hi.expand(shape)

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

    def settle(self, tiles: Rectangles) -> None:
        """Decide single tiles by their scores: a few samples first, all of them where those
        agree."""
        for count in _SAMPLES:
            if not len(tiles):
                return
            some, every = self.sample(tiles, count)
            mixed = some & ~every
            self.note(tiles[mixed], partial=True)
            tiles = tiles[~mixed]
        if len(tiles):
            some, every = self.evaluate_all(tiles)
            self.note(tiles[every], partial=False)
            self.note(tiles[some & ~every], partial=True)

    def sample(self, tiles: Rectangles, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(any, all) over count x count evenly spread scores of each tile, corners included."""
        spans = self.spans(tiles)
        step = torch.arange(count, device=self.device)

        def spread(name: str) -> torch.Tensor:
            first, last = spans[name]
            return first[:, None] + (last - first)[:, None] * step // (count - 1)

        return self.scores(tiles, spread("q"), spread("kv"))

    def evaluate_all(self, tiles: Rectangles) -> tuple[torch.Tensor, torch.Tensor]:
        """(any, all) over every real score of each tile, in pieces of bounded size."""
        grid = self.grid
        height, width = min(grid.q_block, grid.q_len), min(grid.kv_block, grid.kv_len)
        piece_width = min(width, _BATCH_LANES)
        piece_height = min(height, _BATCH_LANES // piece_width)
        batch = max(1, _BATCH_LANES // (piece_height * piece_width))
        results = []
        for begin in range(0, len(tiles), batch):
            part = tiles[begin : begin + batch]
            spans = self.spans(part)
            some = torch.zeros(len(part), dtype=torch.bool, device=self.device)
            every = ~some
            for i in range(0, height, piece_height):
                q = _lanes(spans["q"], i, piece_height)
                for j in range(0, width, piece_width):
                    kv = _lanes(spans["kv"], j, piece_width)
                    piece_some, piece_every = self.scores(part, q, kv)
                    some, every = some | piece_some, every & piece_every
                if bool((some & ~every).all()):
                    break
            results.append((some, every))
        return torch.cat([s for s, _ in results]), torch.cat([e for _, e in results])

    def scores(
        self, tiles: Rectangles, q: torch.Tensor, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(any, all) of the mask at q [n, rows] x kv [n, columns] of each tile."""
        inputs = {
            "b": tiles.b[:, None, None],
            "h": tiles.h[:, None, None],
            "q": q[:, :, None],
            "kv": kv[:, None, :],
        }
        (kept,) = interpret(self.bound, inputs)
        kept = kept.expand(len(tiles), q.shape[1], kv.shape[1]).flatten(1)
        return kept.any(1), kept.all(1)


def _lanes(span: tuple[torch.Tensor, torch.Tensor], begin: int, count: int) -> torch.Tensor:
    """[n, count] positions from begin on; those past the end repeat the last one."""
    first, last = span
    lanes = first[:, None] + torch.arange(begin, begin + count, device=first.device)
    return torch.minimum(lanes, last[:, None])
