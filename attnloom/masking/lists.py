"""Ragged lists of live tiles: the one stored form of a block mask, and operations on it.

A list entry is `kv_block * 2 + partial`, so that one sorted int32 array holds full and partial
tiles together; a mask of 1,048,576 x 1,048,576 causal tokens takes 134 MB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnloom.errors import OptionError, ShapeError
from attnloom.masking import transforms
from attnloom.masking.arguments import shown


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of num_batches * num_heads score matrices of q_len x kv_len tokens.

    Tiles of the last row and column may overhang the lengths; lanes out there do not count.
    """

    num_batches: int
    num_heads: int
    q_len: int
    kv_len: int
    q_block: int
    kv_block: int

    @property
    def num_q_blocks(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.kv_len // self.kv_block)

    @property
    def num_rows(self) -> int:
        return self.num_batches * self.num_heads * self.num_q_blocks


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """Ragged lists of live tiles, as kernels read them.

    Row r = (b * num_heads + h) * num_q_blocks + q_block, where b or h is 0 when the mask has one
    batch entry or one head. Lists are in ascending key order.

    row_offsets: [rows + 1] int64; entries of row r are row_offsets[r] .. row_offsets[r + 1].
    entries: [total] int32; kv_block * 2 + 1 for a partial tile, kv_block * 2 for a full one.
    num_batches, num_heads: of the mask: 1 means broadcast.
    q_block, kv_block: tile sizes in tokens. q_len, kv_len: lengths in tokens.
    q_offset, kv_offset: added to a position before the mask_mod (and only it) sees it.
    chosen: not derived from the mask_mod, which may hold where there is no tile.
    """

    row_offsets: torch.Tensor
    entries: torch.Tensor
    num_batches: int
    num_heads: int
    q_block: int
    kv_block: int
    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_offset: int = 0
    chosen: bool = False

    @property
    def grid(self) -> TileGrid:
        return TileGrid(
            self.num_batches,
            self.num_heads,
            self.q_len,
            self.kv_len,
            self.q_block,
            self.kv_block,
        )

    @property
    def row_counts(self) -> torch.Tensor:
        """[rows] int64: live tiles of each row."""
        return self.row_offsets.diff()

    def entry_rows(self) -> torch.Tensor:
        """[total] int64: the row of each entry."""
        rows = torch.arange(self.row_offsets.numel() - 1, device=self.entries.device)
        return torch.repeat_interleave(rows, self.row_counts, output_size=self.entries.numel())


@dataclass(frozen=True, slots=True)
class Runs:
    """Horizontal runs of equal tiles: tiles start .. stop - 1 of a row, all full or all partial.

    row, start, stop: [n] int64. partial: [n] bool. In any order; runs of a row do not overlap.
    """

    row: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    partial: torch.Tensor

    @staticmethod
    def join(parts: list[Runs]) -> Runs:
        return Runs(
            torch.cat([p.row for p in parts]),
            torch.cat([p.start for p in parts]),
            torch.cat([p.stop for p in parts]),
            torch.cat([p.partial for p in parts]),
        )


def lists_of(grid: TileGrid, row_offsets: torch.Tensor, entries: torch.Tensor) -> BlockLists:
    return BlockLists(
        row_offsets,
        entries,
        grid.num_batches,
        grid.num_heads,
        grid.q_block,
        grid.kv_block,
        grid.q_len,
        grid.kv_len,
    )


def lists_from_runs(grid: TileGrid, runs: Runs) -> BlockLists:
    """Expand runs into sorted entries; linear in the entries, n log n in the runs."""
    device = runs.row.device
    keep = (runs.stop > runs.start).nonzero().squeeze(-1)
    order = keep[torch.argsort(runs.row[keep] * (grid.num_kv_blocks + 1) + runs.start[keep])]
    row, start, stop = runs.row[order], runs.start[order], runs.stop[order]
    partial = runs.partial[order].to(torch.int64)
    lengths = stop - start
    counts = torch.zeros(grid.num_rows, dtype=torch.int64, device=device)
    row_offsets = _offsets(counts.index_add_(0, row, lengths))
    # Entries step by 2 within a run and jump at its start: a running sum makes them in place.
    ends = lengths.cumsum(0)
    entries = torch.full(
        (int(ends[-1]) if ends.numel() else 0,), 2, dtype=torch.int32, device=device
    )
    first, last = start * 2 + partial, (stop - 1) * 2 + partial
    jump = first.clone()
    jump[1:] -= last[:-1]
    entries[ends - lengths] = jump.to(torch.int32)
    return lists_of(grid, row_offsets, entries.cumsum_(0))


def lists_from_keys(grid: TileGrid, rows: torch.Tensor, entries: torch.Tensor) -> BlockLists:
    """Sort loose tiles, given as (row, entry) pairs, into lists.

    Raises:
        ShapeError: a tile is listed twice, which would count its keys twice.
    """
    stride = 2 * max(grid.num_kv_blocks, 1)
    keys = (rows * stride + entries).sort().values
    twice = (keys[1:] >> 1) == (keys[:-1] >> 1)
    if bool(twice.any()):
        key = int(keys[1:][twice][0])
        row, column = divmod(key // 2, stride // 2)
        raise ShapeError(
            f"kv block {column} is listed twice in query block {row % grid.num_q_blocks} "
            f"(batch and head entry {row // grid.num_q_blocks}); its keys would count twice. "
            "List a tile once, either in kv_indices or in full_kv_indices."
        )
    counts = torch.bincount(keys // stride, minlength=grid.num_rows)
    return lists_of(grid, _offsets(counts), (keys % stride).to(torch.int32))


def take_rows(lists: BlockLists, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row offsets and entries of the given rows ([n] int64), in the order given."""
    begin = lists.row_offsets[:-1][rows]
    counts = lists.row_offsets[1:][rows] - begin
    offsets = _offsets(counts)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(begin - offsets[:-1], counts, output_size=total)
    return offsets, lists.entries[shift + torch.arange(total, device=shift.device)]


def select(
    lists: BlockLists,
    batches: torch.Tensor,
    heads: torch.Tensor,
    q_blocks: torch.Tensor,
    q_len: int,
) -> BlockLists:
    """Lists of the outer product of some batch entries, heads and query blocks."""
    flat = (batches[:, None, None] * lists.num_heads + heads[:, None]) * lists.grid.num_q_blocks
    offsets, entries = take_rows(lists, (flat + q_blocks).flatten())
    return replace(
        lists,
        row_offsets=offsets,
        entries=entries,
        num_batches=batches.numel(),
        num_heads=heads.numel(),
        q_len=q_len,
    )


def shift_rows(lists: BlockLists, start: int, stop: int) -> BlockLists:
    """Lists of queries start .. stop - 1, on a grid that begins at `start`.

    A new tile that straddles two old ones is full where both are, partial where either is live:
    sound, and exact once the mask_mod has run on the partial ones.
    """
    q_block, old_blocks = lists.q_block, lists.grid.num_q_blocks
    device = lists.entries.device
    grid = replace(lists.grid, q_len=stop - start)
    first = start + q_block * torch.arange(grid.num_q_blocks, device=device)
    last = (first + q_block - 1).clamp(max=stop - 1)
    upper, lower = first // q_block, last // q_block
    bases = old_blocks * torch.arange(lists.num_batches * lists.num_heads, device=device)[:, None]
    offsets, entries = take_rows(lists, (bases + upper).flatten())
    if bool((upper == lower).all()):
        return lists_of(grid, offsets, entries)
    spans_two = (lower > upper).repeat(bases.numel())
    rows = torch.repeat_interleave(
        torch.arange(grid.num_rows, device=device), offsets.diff(), output_size=entries.numel()
    )
    below = spans_two.nonzero().squeeze(-1)
    low_offsets, low_entries = take_rows(lists, (bases + lower).flatten()[below])
    low_rows = torch.repeat_interleave(below, low_offsets.diff(), output_size=low_entries.numel())
    stride = max(grid.num_kv_blocks, 1)
    tiles = torch.cat([rows * stride + (entries >> 1), low_rows * stride + (low_entries >> 1)])
    is_full = 1 - (torch.cat([entries, low_entries]) & 1)
    tiles, group = tiles.unique(return_inverse=True)
    fulls = torch.zeros_like(tiles).index_add_(0, group, is_full.to(torch.int64))
    row, column = tiles // stride, tiles % stride
    partial = (fulls < 1 + spans_two[row].to(torch.int64)).to(torch.int64)
    counts = torch.bincount(row, minlength=grid.num_rows)
    return lists_of(grid, _offsets(counts), (column * 2 + partial).to(torch.int32))


def crop(lists: BlockLists, q_len: int, kv_len: int) -> BlockLists:
    """Lists of the first q_len queries and kv_len keys. A full tile that is cut stays full."""
    grid = replace(lists.grid, q_len=q_len, kv_len=kv_len)
    out = shift_rows(lists, 0, q_len)
    if grid.num_kv_blocks < lists.grid.num_kv_blocks:
        inside = out.entries < 2 * grid.num_kv_blocks
        counts = torch.bincount(out.entry_rows()[inside], minlength=grid.num_rows)
        out = lists_of(grid, _offsets(counts), out.entries[inside])
    return replace(out, kv_len=kv_len)


def transpose(lists: BlockLists, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Column lists of the tiles of one kind.

    Returns:
        offsets [num_batches * num_heads * num_kv_blocks + 1] int64 and query blocks [total] int32,
        ascending in each column.
    """
    grid = lists.grid
    chosen = of_kind(lists, kind)
    rows, columns = lists.entry_rows()[chosen], lists.entries[chosen] >> 1
    outer, q_block = rows // max(grid.num_q_blocks, 1), rows % max(grid.num_q_blocks, 1)
    flat = outer * grid.num_kv_blocks + columns
    order = torch.argsort(flat, stable=True)
    num_columns = grid.num_batches * grid.num_heads * grid.num_kv_blocks
    counts = torch.bincount(flat, minlength=num_columns)
    return _offsets(counts), q_block[order].to(torch.int32)


def of_kind(lists: BlockLists, kind: str) -> torch.Tensor:
    """Which entries are "partial", "full" or "live" (either): [total] bool."""
    if kind == "live":
        return torch.ones_like(lists.entries, dtype=torch.bool)
    return (lists.entries & 1) == (1 if kind == "partial" else 0)


def live_area(lists: BlockLists) -> int:
    """Scores inside live tiles, lanes beyond the lengths left out; over the stored entries."""
    grid = lists.grid
    if not lists.entries.numel():
        return 0
    counts = lists.row_counts.view(-1, grid.num_q_blocks)
    in_last_column = (lists.entries >> 1) == grid.num_kv_blocks - 1
    # Rows with a tile in the last column hold it as their last entry.
    ends = (lists.row_offsets[1:] - 1).clamp(min=0)
    last = (in_last_column[ends] & (lists.row_counts > 0)).view(counts.shape)
    columns = counts * grid.kv_block - last * (grid.num_kv_blocks * grid.kv_block - grid.kv_len)
    heights = torch.full((grid.num_q_blocks,), grid.q_block, device=counts.device)
    heights[-1] -= grid.num_q_blocks * grid.q_block - grid.q_len
    return int((columns * heights).sum())


def share_equal(lists: BlockLists) -> BlockLists:
    """Store once what is equal over all heads, and over all batch entries."""
    for axis in ("num_heads", "num_batches"):
        lists = _share_axis(lists, axis)
    return lists


def _share_axis(lists: BlockLists, axis: str) -> BlockLists:
    size = getattr(lists, axis)
    if size <= 1 or not lists.grid.num_rows:
        return lists
    outer = 1 if axis == "num_batches" else lists.num_batches
    counts = lists.row_counts.view(outer, size, -1)
    if not torch.equal(counts, counts[:, :1].expand_as(counts)):
        return lists
    totals = counts[:, 0].sum(-1).tolist()
    begin = 0
    kept = []
    for total in totals:
        copies = lists.entries[begin : begin + size * total].view(size, total)
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            return lists
        kept.append(copies[0])
        begin += size * total
    return replace(
        lists,
        row_offsets=_offsets(counts[:, 0].flatten()),
        entries=torch.cat(kept),
        **{axis: 1},
    )


def plain(lists: BlockLists) -> BlockLists:
    """The lists without the wrappers of torch.func; themselves if they have none."""
    tensors = (lists.row_offsets, lists.entries)
    if not any(map(transforms.is_wrapped, tensors)):
        return lists
    row_offsets, entries = map(transforms.plain, tensors)
    return replace(lists, row_offsets=row_offsets, entries=entries)


def block_size_pair(BLOCK_SIZE: int | tuple[int, int]) -> tuple[int, int]:
    """(query, key) block sizes, checked: powers of two from 16."""
    if isinstance(BLOCK_SIZE, int):
        pair = (BLOCK_SIZE, BLOCK_SIZE)
    else:
        pair = tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(size, int) for size in pair):
        raise OptionError(
            f"BLOCK_SIZE is {shown(BLOCK_SIZE)}; it must be one int or a pair (query, key) of ints."
        )
    for size in pair:
        if size < 16 or size & (size - 1):
            raise OptionError(
                f"BLOCK_SIZE is {shown(BLOCK_SIZE)}, and {size} is not a power of two from 16; "
                "kernels cut tiles out of blocks. Use 16, 32, 64, 128, 256, ..."
            )
    return pair


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets
