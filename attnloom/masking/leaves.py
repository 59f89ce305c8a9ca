"""Decides single tiles that interval arithmetic over the whole tile leaves open.

Cheapest first, each on what is still open: a few sampled scores that differ make a tile partial,
then its first and last row, which hold every distance q - kv of the tile; intervals over its rows,
then over its columns, one position wide, where everything on that side is known exactly; at last
all of its scores, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from attnloom.ir.interpret import interpret
from attnloom.masking.ranges import Ranges, Rectangles
from attnloom.masking.summaries import Range

_SAMPLES = (2, 8, 16)
_BATCH_LANES = 1 << 20
_BATCH_STRIPS = 1 << 16

# (surely some kept, surely some dropped, decided) of each tile, [n] bool
Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def settle(ranges: Ranges, tiles: Rectangles) -> tuple[Rectangles, Rectangles]:
    """The full and the partial ones among tiles."""
    stages: list[Callable[[Rectangles], Verdict]] = [
        *(partial(_sample, ranges, count=count) for count in _SAMPLES),
        partial(_outer_rows, ranges),
        partial(_strips, ranges, side="q"),
        partial(_strips, ranges, side="kv"),
        partial(_all_scores, ranges),
    ]
    full, mixed = [tiles[:0]], [tiles[:0]]
    for stage in stages:
        if not len(tiles):
            break
        kept, dropped, decided = stage(tiles)
        full.append(tiles[decided & kept & ~dropped])
        mixed.append(tiles[decided & kept & dropped])
        tiles = tiles[~decided]
    return Rectangles.join(full), Rectangles.join(mixed)


def _sample(ranges: Ranges, tiles: Rectangles, count: int) -> Verdict:
    """count x count evenly spread scores of each tile, corners included."""
    spans = ranges.spans(tiles)
    step = torch.arange(count, device=ranges.device)

    def spread(name: str) -> torch.Tensor:
        first, last = spans[name]
        return first[:, None] + (last - first)[:, None] * step // (count - 1)

    some, every = _scores(ranges, tiles, spread("q"), spread("kv"))
    return some, ~every, some & ~every


def _outer_rows(ranges: Ranges, tiles: Rectangles) -> Verdict:
    """All scores of each tile's first and last row."""
    width = min(ranges.grid.kv_block, ranges.grid.kv_len)
    parts = []
    for batch, piece in _batches(tiles, width, _BATCH_LANES // 2):
        spans = ranges.spans(batch)
        some = torch.zeros(len(batch), dtype=torch.bool, device=ranges.device)
        every = ~some
        for begin in range(0, width, piece):
            columns = _lanes(spans["kv"], begin, piece)
            found = _scores(ranges, batch, torch.stack(spans["q"], 1), columns)
            some, every = some | found[0], every & found[1]
        parts.append((some, ~every, some & ~every))
    return _join(parts)


def _strips(ranges: Ranges, tiles: Rectangles, side: str) -> Verdict:
    """Rows or columns of each tile, one position wide."""
    grid = ranges.grid
    size = min(grid.q_block, grid.q_len) if side == "q" else min(grid.kv_block, grid.kv_len)
    parts = []
    for batch, piece in _batches(tiles, size, _BATCH_STRIPS):
        kept = dropped = torch.zeros(len(batch), dtype=torch.bool, device=ranges.device)
        every = none = ~kept
        span = ranges.spans(batch)[side]
        for begin in range(0, size, piece):
            surely, possibly = ranges.over_strips(batch, side, _lanes(span, begin, piece))
            kept, dropped = kept | surely.any(1), dropped | ~possibly.all(1)
            every, none = every & surely.all(1), none & ~possibly.any(1)
        parts.append((kept, dropped, (kept & dropped) | every | none))
    return _join(parts)


def _all_scores(ranges: Ranges, tiles: Rectangles) -> Verdict:
    """Every real score of each tile."""
    grid = ranges.grid
    height, width = min(grid.q_block, grid.q_len), min(grid.kv_block, grid.kv_len)
    parts = []
    for batch, area in _batches(tiles, height * width, _BATCH_LANES):
        piece_width = min(width, area)
        piece_height = min(height, area // piece_width)
        spans = ranges.spans(batch)
        some = torch.zeros(len(batch), dtype=torch.bool, device=ranges.device)
        every = ~some
        for i in range(0, height, piece_height):
            q = _lanes(spans["q"], i, piece_height)
            for j in range(0, width, piece_width):
                kv = _lanes(spans["kv"], j, piece_width)
                piece_some, piece_every = _scores(ranges, batch, q, kv)
                some, every = some | piece_some, every & piece_every
            if bool((some & ~every).all()):
                break
        parts.append((some, ~every, torch.ones_like(some)))
    return _join(parts)


def _scores(ranges: Ranges, tiles: Rectangles, q: torch.Tensor, kv: torch.Tensor) -> Range:
    """(any, all) of the mask at q [n, rows] x kv [n, columns] of each tile."""
    inputs = {
        "b": tiles.b[:, None, None],
        "h": tiles.h[:, None, None],
        "q": q[:, :, None],
        "kv": kv[:, None, :],
    }
    (kept,) = interpret(ranges.bound, inputs)
    kept = kept.expand(len(tiles), q.shape[1], kv.shape[1]).flatten(1)
    return kept.any(1), kept.all(1)


def _batches(tiles: Rectangles, lanes: int, limit: int) -> Iterator[tuple[Rectangles, int]]:
    """Batches of tiles, and how many of the `lanes` of each tile to take at a time, so that at
    most `limit` are looked at together."""
    piece = min(lanes, limit)
    for batch in tiles.split(max(1, limit // piece)):
        yield batch, piece


def _lanes(span: Range, begin: int, count: int) -> torch.Tensor:
    """[n, count] positions from begin on; those past the end repeat the last one."""
    first, last = span
    lanes = first[:, None] + torch.arange(begin, begin + count, device=first.device)
    return torch.minimum(lanes, last[:, None])


def _join(parts: list[Verdict]) -> Verdict:
    kept, dropped, decided = (torch.cat(column) for column in zip(*parts, strict=True))
    return kept, dropped, decided
