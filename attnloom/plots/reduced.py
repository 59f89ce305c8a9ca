"""Pictures of regions with more scores than can be held: how much of each cell is what.

Cells stand for many tokens. Full and empty tiles are counted, from running sums along a row of
tiles; partial ones are asked score by score, a bounded number at a time. Memory goes with the live
tiles and the cells, time also with the scores of partial tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError
from attnloom.ir.interpret import interpret
from attnloom.ir.node import BoundProgram
from attnloom.masking.views import MaskMod
from attnloom.plots.cells import (
    MAX_CELLS,
    MAX_SCORES,
    Kind,
    colours_of,
    device_of,
    live_tiles,
    run_lengths,
    seen_from,
    tile_spans,
    token_kinds,
)
from attnloom.plots.colours import palette_rgb
from attnloom.plots.region import Region, Span
from attnloom.trace.tracer import trace_mask

MAX_ASKED = 1 << 30
_AT_ONCE = 1 << 22
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Axis:
    """One side of the picture: `length` tokens, of which each cell stands for `step`."""

    length: int
    step: int

    @property
    def count(self) -> int:
        return -(-self.length // self.step)

    @property
    def edges(self) -> np.ndarray:
        """[cells + 1]: where each cell begins, and where the last one ends."""
        return np.minimum(np.arange(self.count + 1) * self.step, self.length)


def token_colours(
    mask_mod: MaskMod, block_mask: BlockMask | None, region: Region, head: int
) -> np.ndarray:
    """[rows, columns, 3] float64 of the tokens of a region, at most MAX_CELLS a side.

    Raises:
        ShapeError: partial tiles have more than MAX_ASKED scores. TraceError: mask_mod has no
            trace.
    """
    rows, columns = region.shape
    if rows * columns <= MAX_SCORES:
        return colours_of(token_kinds(mask_mod, block_mask, region, head))
    in_tiles = block_mask is not None
    if block_mask is None:
        mask_mod = functools.partial(
            seen_from, mask_mod, (region.batch, head, region.q[0], region.kv[0])
        )
        where = device_of(mask_mod, torch.device("cpu"))
        block_mask = create_block_mask(
            mask_mod, None, None, rows, columns, device=where, BLOCK_SIZE=_BLOCK
        )
        region, head = Region(0, (0,), (0, rows), (0, columns)), 0
    shares = _shares(mask_mod, block_mask, region, head)
    if not in_tiles:
        shares[Kind.FULL] += shares[Kind.PARTIAL]
        shares[Kind.EMPTY] += shares[Kind.DROPPED]
        shares[Kind.PARTIAL] = shares[Kind.DROPPED] = 0
    return np.einsum("kij,kc->ijc", shares, palette_rgb())


def _shares(mask_mod: MaskMod, block_mask: BlockMask, region: Region, head: int) -> np.ndarray:
    """[kinds, rows, columns] float64: the share of each kind in each cell."""
    q, kv = (_Axis(length, -(-length // MAX_CELLS)) for length in region.shape)
    counts = np.zeros((4, q.count, kv.count))
    owner, column, partial = live_tiles(block_mask, region, head)
    (top, bottom), (left, right) = tile_spans(block_mask, region)
    rows = _clipped(top, bottom, block_mask.BLOCK_SIZE[0], region.q)
    columns = _clipped(left, right, block_mask.BLOCK_SIZE[1], region.kv)
    asked = np.diff(rows)[owner[partial]] @ np.diff(columns)[column[partial]]
    _check_asked(int(asked), region)
    device = device_of(mask_mod, block_mask.device)
    with torch.no_grad():
        asking = _Asking(trace_mask(mask_mod, device), device, region, head)
    begin = np.searchsorted(owner, np.arange(bottom - top + 1))
    for row in range(bottom - top):
        inside = slice(begin[row], begin[row + 1])
        tiles, is_partial = column[inside], partial[inside]
        first, end = int(rows[row]), int(rows[row + 1])
        of_rows = _overlaps(q, first, end)  # cells and how many of these queries lie in each
        for kind, chosen in ((Kind.FULL, ~is_partial), (Kind.DROPPED, is_partial)):
            live = np.zeros(right - left)
            live[tiles[chosen]] = 1
            sums = np.concatenate([[0.0], np.cumsum(live * np.diff(columns))])
            line = np.rint(np.diff(np.interp(kv.edges, columns, sums)))
            for cell, queries in of_rows:
                counts[kind, cell] += queries * line
        kept = asking.kept(
            q, kv, (first, end), [(int(columns[c]), int(columns[c + 1])) for c in tiles[is_partial]]
        )
        for cell, line in kept:
            counts[Kind.PARTIAL, cell] += line
            counts[Kind.DROPPED, cell] -= line
    area = np.multiply.outer(run_lengths(q.length, q.step), run_lengths(kv.length, kv.step))
    counts[Kind.EMPTY] = area - counts.sum(0)
    return counts / area


def _check_asked(scores: int, region: Region) -> None:
    if scores > MAX_ASKED:
        rows, columns = region.shape
        raise ShapeError(
            f"a picture of {rows} x {columns} tokens asks for {scores} scores in partial tiles, "
            f"more than {MAX_ASKED}. Zoom in with q_range=(first, end) and kv_range=(first, end), "
            "or draw tiles with plot_block_map, which takes any length."
        )


def _clipped(first: int, end: int, block: int, span: Span) -> np.ndarray:
    """[tiles + 1]: where tiles first .. end - 1 begin and end, from the span's start and cut to
    it."""
    return np.clip(np.arange(first, end + 1) * block, *span) - span[0]


def _overlaps(axis: _Axis, first: int, end: int) -> list[tuple[int, int]]:
    """Cells that tokens first .. end - 1 lie in, and how many of them in each."""
    cells = range(first // axis.step, (end - 1) // axis.step + 1)
    return [
        (cell, min(end, (cell + 1) * axis.step) - max(first, cell * axis.step)) for cell in cells
    ]


@dataclass(frozen=True, slots=True)
class _Asking:
    """A traced mask, asked at scores of a region."""

    bound: BoundProgram
    device: torch.device
    region: Region
    head: int

    def kept(
        self, q: _Axis, kv: _Axis, rows: Span, tiles: list[tuple[int, int]]
    ) -> list[tuple[int, np.ndarray]]:
        """Kept scores of some tiles of a row of tiles: (cell row, [cell columns]) pairs."""
        if not tiles:
            return []
        queries = np.arange(*rows)
        keys = np.concatenate([np.arange(*tile) for tile in tiles])
        cells, starts = np.unique(queries // q.step, return_index=True)
        found = np.zeros((len(cells), kv.count))
        width = max(1, _AT_ONCE // len(queries))
        for begin in range(0, len(keys), width):
            part = keys[begin : begin + width]
            kept = self._ask(queries, part)
            by_cell = np.add.reduceat(kept, starts, axis=0, dtype=np.int64)
            for line, sums in zip(found, by_cell, strict=True):
                line += np.bincount(part // kv.step, sums, kv.count)
        return list(zip(cells.tolist(), found, strict=True))

    def _ask(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """[queries, keys] bool."""
        inputs = {
            "b": torch.full((1, 1), self.region.batch),
            "h": torch.full((1, 1), self.head),
            "q": torch.from_numpy(queries + self.region.q[0])[:, None],
            "kv": torch.from_numpy(keys + self.region.kv[0]),
        }
        inputs = {name: x.to(self.device) for name, x in inputs.items()}
        with torch.no_grad():
            kept = interpret(self.bound, inputs)[0]
        return kept.expand(len(queries), len(keys)).cpu().numpy()
