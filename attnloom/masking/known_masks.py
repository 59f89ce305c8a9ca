"""Masks known in advance: key ranges, packed documents and dense tables, without a mask_mod.

Each has a mod (at module level, bound by functools.partial, so that it pickles by name) and the
values that it captures. Block lists of key ranges follow directly from the ranges, in time linear
in Q_LEN and the live tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from attnloom.errors import DtypeError, OptionError, ShapeError, any_of, counted
from attnloom.masking.lists import BlockLists, Runs, TileGrid, lists_from_runs
from attnloom.masking.views import MaskMod


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Keys start .. stop - 1 of every query. start, stop: [Bm, Hm, Q_LEN] int64 in 0 .. kv_len."""

    start: torch.Tensor
    stop: torch.Tensor
    kv_len: int

    def grid(self, block: tuple[int, int]) -> TileGrid:
        B, H, Q_LEN = self.start.shape
        return TileGrid(B, H, Q_LEN, self.kv_len, *block)


@dataclass(frozen=True, slots=True)
class Documents:
    """Where queries and keys lie in their documents; rows are batch entries.

    ids_q, rank_q [Bm, Q_LEN]; ids_kv, rank_kv [Bm, KV_LEN]: document, and position inside it.
    ranges: the keys of each query's document where every document's keys are contiguous.
    """

    ids_q: torch.Tensor
    ids_kv: torch.Tensor
    rank_q: torch.Tensor
    rank_kv: torch.Tensor
    ranges: KeyRanges | None


def lookup(
    layout: str, table: torch.Tensor, b: torch.Tensor, h: torch.Tensor, *position: torch.Tensor
) -> torch.Tensor:
    """table[b, h, *position], less the batch or head index that the layout ("", "b", "h" or "bh")
    does not name."""
    leading = {"": (), "b": (b,), "h": (h,), "bh": (b, h)}[layout]
    return table[(*leading, *position)]


def key_range_mask(
    layout: str,
    start: torch.Tensor,
    stop: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """Keys start .. stop - 1 of each query."""
    first = lookup(layout, start, b, h, q_idx)
    return (kv_idx >= first) & (kv_idx < lookup(layout, stop, b, h, q_idx))


def table_mask(
    layout: str,
    mask: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """A dense mask, read one score at a time."""
    return lookup(layout, mask, b, h, q_idx, kv_idx)


def packed_mask(
    inner: MaskMod,
    tables: tuple[torch.Tensor, ...],
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """`inner` inside each packed document, which sees itself as a batch entry of its own.

    tables: document, first query, first key of it, and the key range, of each query.
    """
    document, first_q, first_kv, start, stop = (table[q_idx] for table in tables)
    inside = (kv_idx >= start) & (kv_idx < stop)
    return inside & inner(document, h, q_idx - first_q, kv_idx - first_kv)


def contiguous_document_mask(
    layout: str,
    inner: MaskMod,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """`inner` on positions within documents; tables: position, first and last key + 1 of each
    query's document."""
    position, start, stop = (lookup(layout, table, b, h, q_idx) for table in tables)
    inside = (kv_idx >= start) & (kv_idx < stop)
    return inside & inner(b, h, position, kv_idx - start)


def document_mask(
    layout: str,
    ids_q: torch.Tensor,
    ids_kv: torch.Tensor,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """Query and key carry the same document id."""
    return lookup(layout, ids_q, b, h, q_idx) == lookup(layout, ids_kv, b, h, kv_idx)


def scattered_document_mask(
    layout: str,
    inner: MaskMod,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """`inner` on positions within documents; tables: ids and positions of queries, of keys."""
    id_q, rank_q = (lookup(layout, table, b, h, q_idx) for table in tables[:2])
    id_kv, rank_kv = (lookup(layout, table, b, h, kv_idx) for table in tables[2:])
    return (id_q == id_kv) & inner(b, h, rank_q, rank_kv)


def bind_tables(mask: Any, *tables: torch.Tensor) -> MaskMod:
    """A mask of [Bm, Hm, ...] tables; dimensions of size 1 are dropped and broadcast."""
    batched, headed = (any(t.shape[dim] != 1 for t in tables) for dim in (0, 1))
    layout = ("b" if batched else "") + ("h" if headed else "")
    kept = [t if headed else t[:, 0] for t in tables]
    return functools.partial(mask, layout, *(t if batched else t[0] for t in kept))


def range_mod(ranges: KeyRanges) -> MaskMod:
    return bind_tables(key_range_mask, _compact(ranges.start), _compact(ranges.stop))


def range_lists(ranges: KeyRanges, block: tuple[int, int]) -> BlockLists:
    """Lists of exactly the tiles that some query's range meets; full where all ranges cover it."""
    grid = ranges.grid(block)
    device = ranges.start.device
    if not grid.num_rows or not grid.num_kv_blocks:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return lists_from_runs(grid, Runs(empty, empty, empty, empty.bool()))
    lanes = min(grid.q_block, grid.q_len)
    # Lanes beyond Q_LEN are copies of the last query, so that they change no minimum.
    lane = torch.arange(grid.num_q_blocks * lanes, device=device).clamp(max=grid.q_len - 1)
    start = ranges.start[..., lane].reshape(-1, lanes)  # [rows, lanes]
    stop = ranges.stop[..., lane].reshape(-1, lanes)
    has_keys = stop > start
    first = torch.where(has_keys, start // grid.kv_block, grid.num_kv_blocks)
    last = torch.where(has_keys, (stop + grid.kv_block - 1) // grid.kv_block, 0)
    row, begin, end = _unions(first, last)
    # A last block that overhangs is covered by whoever reaches KV_LEN.
    lowest = stop.amin(1)
    cover_end = torch.where(lowest >= grid.kv_len, grid.num_kv_blocks, lowest // grid.kv_block)
    cover = (start.amax(1) + grid.kv_block - 1) // grid.kv_block
    cover_end = torch.where(has_keys.all(1), torch.maximum(cover_end, cover), cover)
    left = cover[row].clamp(begin, end)
    right = cover_end[row].clamp(begin, end)
    partial = torch.ones_like(row, dtype=torch.bool)
    runs = [
        Runs(row, begin, left, partial),
        Runs(row, left, right, ~partial),
        Runs(row, right, end, partial),
    ]
    return lists_from_runs(grid, Runs.join(runs))


def _unions(
    first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Disjoint unions of the intervals [first, last) of each row: (row, begin, end).

    first, last: [rows, lanes]; an empty interval has first beyond every other and last 0.
    """
    num_rows, lanes = first.shape
    first, order = first.sort(dim=1)
    last = last.gather(1, order)
    reach = last.cummax(dim=1).values
    opens = torch.ones_like(first, dtype=torch.bool)
    opens[:, 1:] = first[:, 1:] > reach[:, :-1]
    place = opens.flatten().nonzero().squeeze(1)
    row = place // lanes
    following = torch.cat([place[1:], place.new_tensor([num_rows * lanes])])
    closes = torch.minimum(following, (row + 1) * lanes) - 1
    keep = last.flatten()[place] > 0
    return row[keep], first.flatten()[place[keep]], reach.flatten()[closes[keep]]


def table_lists(table: torch.Tensor, block: tuple[int, int]) -> BlockLists:
    """Lists of a dense mask [Bm, Hm, Q_LEN, KV_LEN] bool, one row of tiles at a time."""
    B, H, Q_LEN, KV_LEN = table.shape
    grid = TileGrid(B, H, Q_LEN, KV_LEN, *block)
    columns = torch.arange(grid.num_kv_blocks, device=table.device)
    runs = []
    heads = torch.arange(grid.num_batches * grid.num_heads, device=table.device)
    for q_block in range(grid.num_q_blocks):
        rows = table[:, :, q_block * grid.q_block : (q_block + 1) * grid.q_block]
        some, every = (_by_block(line, grid) for line in (rows.any(2), rows.all(2)))
        live, full = some.any(-1).flatten(0, 1), every.all(-1).flatten(0, 1)
        at = heads[:, None] * grid.num_q_blocks + q_block
        row, column = (x.expand(live.shape)[live] for x in (at, columns))
        runs.append(Runs(row, column, column + 1, ~full[live]))
    if not runs:
        empty = torch.zeros(0, dtype=torch.int64, device=table.device)
        runs.append(Runs(empty, empty, empty, empty.bool()))
    return lists_from_runs(grid, Runs.join(runs))


def block_bool_lists(
    live: torch.Tensor,
    full: torch.Tensor,
    block: tuple[int, int],
    seq_lengths: tuple[int, int] | None,
) -> BlockLists:
    """Lists of the live tiles of tables [..., q_blocks, kv_blocks]."""
    for name, table in (("live", live), ("full", full)):
        if table.dtype is not torch.bool:
            raise DtypeError(f"{name} is {table.dtype}; it must be torch.bool, one value a tile.")
    if full.shape != live.shape or not 2 <= live.dim() <= 4:
        raise ShapeError(
            f"live has shape {list(live.shape)} and full {list(full.shape)}; both must be "
            "[B, H, q_blocks, kv_blocks], where B and H may be left out."
        )
    table = live[(None,) * (4 - live.dim())]
    B, H, rows, columns = table.shape
    Q_LEN, KV_LEN = seq_lengths or (rows * block[0], columns * block[1])
    grid = TileGrid(B, H, Q_LEN, KV_LEN, *block)
    if (grid.num_q_blocks, grid.num_kv_blocks) != (rows, columns):
        raise ShapeError(
            f"live has {rows} x {columns} tiles, but seq_lengths {(Q_LEN, KV_LEN)} at block size "
            f"{block} make {grid.num_q_blocks} x {grid.num_kv_blocks}."
        )
    row, column = table.reshape(grid.num_rows, columns).nonzero(as_tuple=True)
    partial = ~full.reshape(grid.num_rows, columns)[row, column]
    return lists_from_runs(grid, Runs(row, column, column + 1, partial))


def _by_block(line: torch.Tensor, grid: TileGrid) -> torch.Tensor:
    """[Bm, Hm, KV_LEN] -> [Bm, Hm, kv_blocks, kv_block]; the last value fills the overhang."""
    width = min(grid.kv_block, grid.kv_len) if grid.num_kv_blocks == 1 else grid.kv_block
    missing = grid.num_kv_blocks * width - grid.kv_len
    if missing:
        line = torch.cat([line, line[..., -1:].expand(*line.shape[:-1], missing)], -1)
    return line.reshape(*line.shape[:-1], grid.num_kv_blocks, max(width, 1))


def documents_of(ids_q: torch.Tensor, ids_kv: torch.Tensor) -> Documents:
    """Ranks and key ranges of document ids [Bm, Q_LEN] and [Bm, KV_LEN]."""
    ids_q, ids_kv = ids_q.to(torch.int64), ids_kv.to(torch.int64)
    ordered, order = ids_kv.sort(dim=1, stable=True)
    kv_len = ids_kv.shape[1]
    wanted = ids_q.contiguous()
    low = torch.searchsorted(ordered, wanted)
    count = torch.searchsorted(ordered, wanted, right=True) - low
    contiguous = _num_changes(ids_kv) == _num_changes(ordered)
    ranges = None
    if bool(contiguous.all()):
        if kv_len:
            start = torch.where(count > 0, order.gather(1, low.clamp(max=kv_len - 1)), 0)
        else:
            start = torch.zeros_like(count)
        ranges = KeyRanges(start[:, None], (start + count)[:, None], kv_len)
    return Documents(ids_q, ids_kv, _ranks(ids_q), _ranks(ids_kv), ranges)


def document_mod(documents: Documents, inner: MaskMod | None) -> MaskMod:
    """The mod of documents_of(...), combined with `inner` on positions within documents."""
    wide = {
        name: _compact(getattr(documents, name))[:, None]
        for name in ("ids_q", "rank_q", "ids_kv", "rank_kv")
    }
    ranges = documents.ranges
    if inner is None:
        if ranges is not None:
            return range_mod(ranges)
        return bind_tables(document_mask, wide["ids_q"], wide["ids_kv"])
    if ranges is not None:
        tables = (wide["rank_q"], _compact(ranges.start), _compact(ranges.stop))
        bound = bind_tables(contiguous_document_mask, *tables)
        mask: Any = contiguous_document_mask
    else:
        bound = bind_tables(scattered_document_mask, *wide.values())
        mask = scattered_document_mask
    layout, *kept = bound.args  # type: ignore[attr-defined]
    return functools.partial(mask, layout, inner, tuple(kept))


def _num_changes(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, 1:] != ids[:, :-1]).sum(1)


def _ranks(ids: torch.Tensor) -> torch.Tensor:
    """For each position, how many earlier ones of its row have the same id."""
    ordered, order = ids.sort(dim=1, stable=True)
    place = torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(1, order, place)


def _compact(table: torch.Tensor) -> torch.Tensor:
    """int32 where every value fits: half the memory that kernels read."""
    if table.dtype is not torch.int64 or not table.numel():
        return table
    low, high = torch.aminmax(table)
    fits = int(low) >= -(2**31) and int(high) < 2**31
    return table.to(torch.int32) if fits else table


def check_integer(name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
    """Raises DtypeError or ShapeError unless the tensor is of integers and of a listed rank."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} is a {type(tensor).__name__}; it must be an integer tensor.")
    if tensor.dtype.is_floating_point or tensor.dtype is torch.bool or tensor.is_complex():
        raise DtypeError(f"{name} is {tensor.dtype}; it must hold integers.")
    if tensor.dim() not in ranks:
        raise ShapeError(
            f"{name} has shape {list(tensor.shape)}; it must have {any_of(ranks, 'dimension')}."
        )


def check_cumulative(name: str, cu: torch.Tensor) -> None:
    """Raises OptionError unless integers [documents + 1] start at 0 and never decrease."""
    if cu.numel() < 1 or int(cu[0]) != 0 or bool((cu.diff() < 0).any()):
        raise OptionError(
            f"{name} starts with {cu[:4].tolist()}; cumulative lengths start at 0 and never "
            "decrease. For lengths use torch.nn.functional.pad(lengths.cumsum(0), (1, 0))."
        )


def packed_documents(
    cu_q: torch.Tensor, cu_kv: torch.Tensor, lengths: tuple[int, int], causal: bool
) -> tuple[KeyRanges, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Key ranges of documents given by cumulative lengths, and (document, its first query, its
    first key) of each query. Queries after the last document have no keys.

    causal: the last query of a document sees its last key (aligned at the end, as FlashAttention).
    """
    q_len, kv_len = lengths
    for name, cu, length in (("cu_q", cu_q, q_len), ("cu_kv", cu_kv, kv_len)):
        check_cumulative(name, cu)
        if int(cu[-1]) > length:
            raise ShapeError(f"{name} ends at {int(cu[-1])}, beyond the length {length}.")
    if cu_q.numel() != cu_kv.numel():
        raise ShapeError(
            f"cu_q describes {counted(cu_q.numel() - 1, 'document')} and cu_kv "
            f"{cu_kv.numel() - 1}; both must describe the same documents (of any lengths, 0 "
            "included)."
        )
    cu_q, cu_kv = cu_q.to(torch.int64).contiguous(), cu_kv.to(torch.int64)
    query = torch.arange(q_len, device=cu_q.device)
    # Beyond the last document: one more, without keys.
    document = torch.searchsorted(cu_q, query, right=True) - 1
    first_q, first_kv = cu_q[document], cu_kv[document]
    after = (document + 1).clamp(max=cu_kv.numel() - 1)
    end_q, stop = cu_q[after], cu_kv[after]
    if causal:
        stop = torch.minimum(stop, (stop - (end_q - 1 - query)).clamp(min=0))
    stop = torch.maximum(stop, first_kv)
    ranges = KeyRanges(first_kv[None, None], stop[None, None], kv_len)
    return ranges, (document, first_q, first_kv)


def packed_mod(
    ranges: KeyRanges,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inner: MaskMod | None,
) -> MaskMod:
    if inner is None:
        return range_mod(ranges)
    captured = (*tables, ranges.start[0, 0], ranges.stop[0, 0])
    return functools.partial(packed_mask, inner, tuple(_compact(t) for t in captured))
