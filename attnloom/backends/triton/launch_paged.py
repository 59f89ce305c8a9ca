"""Launches over a cache: what depends on the table's shape, and its kernels' arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import (
    Triple,
    addressed,
    bind,
    blank_descriptors,
    steps,
)
from attnloom.backends.triton.choice import choose
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.decode import combine_kernel
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    launch_key,
    num_tries,
    operand_type,
    shared_fields,
    target_of,
    tma_widths,
)
from attnloom.backends.triton.launch_decode import _num_splits as num_splits_of
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import covering
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.paged import paged_kernel
from attnloom.backends.triton.shared_lists import lists_of_groups
from attnloom.block_mask import BlockLists
from attnloom.paged.table import PageTable

_FEW_ROWS = 64  # queries times heads of a group; more are tiled as a forward
_NO_LISTS = (0.0,) * 8
_READY_LIMIT = 4096
_FAR = 2**31 - 1


@dataclass(frozen=True, repr=False)
class PagedConfig(ForwardConfig):
    """PAGE: tokens a page, 0 without pages. GATHER: a tile spans several pages. FAR: offsets of
    pages need 64 bits. TILE_M = HEADS * QUERIES rows."""

    PAGE: int = 0
    GATHER: bool = False
    FAR: bool = False
    QUERIES: int = 1
    HEADS: int = 1
    HAS_COUNTS: bool = False

    __hash__ = KernelConfig.__hash__


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses; num_partials: rows of partial results, all splits."""

    launch: Launcher
    merge: Launcher | None
    blanks: tuple[Triple, Triple] | None
    num_partials: int
    shape: tuple[float, ...]
    strides: tuple[float, ...]


_ready: dict[tuple[object, ...], _Ready] = {}


def attend(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the kernel and, with more than one split, the merging one. No tensor is empty."""
    table = call.table
    assert table is not None
    tensors = Tensors.of(call, want_max_scores)
    pages = table.pages
    key = (
        launch_key(call, tensors),
        target_of(call),
        None if pages is None else (pages.size(1), table.page_size),
        table.counts is None,
        None if call.blocks is None else (call.blocks.grid.num_q_blocks, call.blocks.num_heads),
    )
    ready = _ready.get(key)
    if ready is None:
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = choose(
            _tiles(call),
            lambda tile: _prepare(call, tensors, tile),
            lambda ready: _launch(ready, call, tensors),
            configs.FEW_SPILLS,
            num_tries(call),
        )
    else:
        _launch(ready, call, tensors)
    return tensors.result()


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    key, value, table = tensors.key, tensors.value, call.table
    assert table is not None
    sources: tuple[object, ...] = (key, key, key, value, value, value)
    if ready.blanks is not None:
        of_key, of_value = ready.blanks
        sources = (*addressed(of_key, key), *addressed(of_value, value))
    lists: tuple[object, ...] = _NO_LISTS
    if call.blocks is not None:
        blocks = _grouped(call)
        # a kernel needs an address, also to read nothing from
        entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
        lists = (blocks.row_offsets, entries, *pack_ints(_list_steps(blocks)))
    partial: tuple[torch.Tensor, ...] = (tensors.lse,) * 3
    if ready.num_partials:
        partial = _partials(ready.num_partials, tensors)
    scale, outputs = pack_double(call.scale), tensors.outputs()
    ready.launch(
        addresses_aligned(call) and _is_aligned(table), tensors.query, *sources, *outputs, *partial,
        lists, _table_argument(table), bind(call.score), bind(call.mask), scale, ready.shape,
        ready.strides,
    )  # fmt: skip
    if ready.merge is not None:
        ready.merge(True, *partial, *outputs, scale, ready.shape, ready.strides)


def _table_argument(table: PageTable) -> tuple[torch.Tensor, ...]:
    lengths = table.lengths
    return (
        lengths,
        lengths if table.counts is None else table.counts,
        lengths if table.pages is None else table.pages,
    )


def _is_aligned(table: PageTable) -> bool:
    address = 0
    for tensor in _table_argument(table):
        address |= tensor.data_ptr()
    return address % 16 == 0


def _partials(count: int, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """partial_acc, partial_m and partial_l of decode.py, in one allocation."""
    # each part starts at a multiple of 16 bytes
    step = -(-count // 4) * 4
    room = tensors.lse.new_empty(2 * step + count * tensors.value.size(3))
    return room[2 * step :], room[:step], room[step : 2 * step]


def _grouped(call: AttentionCall) -> BlockLists:
    """Lists of the heads that share a key head."""
    blocks, group = call.blocks, call.query.size(1) // call.key.size(1)
    assert blocks is not None
    return blocks if blocks.num_heads == 1 or group == 1 else lists_of_groups(blocks, group)


def _list_steps(blocks: BlockLists) -> tuple[int, int]:
    """Rows of lists between batch entries and between heads, in units of one (b, h)."""
    return (
        blocks.num_heads if blocks.num_batches > 1 else 0,
        1 if blocks.num_heads > 1 else 0,
    )


def _prepare(call: AttentionCall, tensors: Tensors, tile: configs.Tile) -> _Ready:
    query, key, value = tensors.query, tensors.key, tensors.value
    table, blocks = call.table, call.blocks
    assert table is not None
    batch, heads, q_len, _ = query.shape
    kv_heads, capacity = key.size(1), _capacity(call)
    group = heads // kv_heads
    queries = min(covering_queries(q_len), tile.tile_m)
    if blocks is not None:
        queries = min(queries, blocks.q_block)
    # queries that begin anywhere on the grid of positions reach into one tile more
    straddles = blocks is not None and q_len > 1
    num_tiles = -(-q_len // queries) + straddles
    num_chunks = -(-group // (tile.tile_m // queries))
    num_programs = batch * kv_heads * num_chunks * num_tiles
    num_splits = num_splits_of(
        # of two tiles that few queries may straddle one is empty
        num_programs // (2 if straddles and num_tiles == 2 else 1),
        -(-capacity // tile.tile_n),
        2 * configs.device_of(query.device).num_processors,
    )
    shape = (
        heads,
        group,
        num_chunks,
        num_splits,
        q_len,
        capacity,
        num_tiles,
        0 if key.size(0) == 1 else 1,
        0 if table.pages is None else table.pages.size(1),
        1 if blocks is None else blocks.grid.num_q_blocks,
        1 if blocks is None else blocks.q_block,
    )
    strides = [step for t in tensors.operands for step in steps(t)]
    fields = shared_fields(call, tensors, tile)
    gather = 0 < table.page_size < tile.tile_n
    fields |= {"MAY_MASK": True, "USE_TMA": fields["USE_TMA"] and not gather}
    config = PagedConfig(
        **fields,
        SINGLE=num_splits == 1,
        WIDTH=triton.next_power_of_2(value.size(3)),
        PAGE=table.page_size,
        GATHER=gather,
        FAR=max(t.stride(0) * (t.size(0) - 1) for t in (key, value)) + _FAR_ROOM > _FAR,
        QUERIES=queries,
        HEADS=tile.tile_m // queries,
        HAS_COUNTS=table.counts is not None,
    )
    blanks = None
    widths = tma_widths(config)
    if widths is not None:
        blanks = (
            blank_descriptors(key, tile.tile_n, widths[0]),
            blank_descriptors(value, tile.tile_n, widths[1]),
        )
    num_rows = batch * heads * q_len
    merge = Launcher(combine_kernel, config, num_rows, {"num_warps": 4})
    return _Ready(
        Launcher(paged_kernel, config, num_programs * num_splits, tile.options),
        merge if num_splits > 1 else None,
        blanks,
        num_rows * num_splits if num_splits > 1 else 0,
        pack_ints(shape),
        pack_ints(strides),
    )


_FAR_ROOM = 1 << 24  # rows and columns of a page


def covering_queries(q_len: int) -> int:
    """The smallest power of two that is not below a number of queries."""
    return 1 << (q_len - 1).bit_length()


def _capacity(call: AttentionCall) -> int:
    """Keys that a sequence has room for, whatever its length is now."""
    table = call.table
    assert table is not None
    if table.pages is None:
        return call.key.size(2)
    return table.pages.size(1) * table.page_size


def _tiles(call: AttentionCall) -> tuple[configs.Tile, ...]:
    query, key, value, blocks = call.query, call.key, call.value, call.blocks
    capacity, table = _capacity(call), call.table
    assert table is not None
    limit_n = covering(capacity)
    if blocks is not None:
        limit_n = min(limit_n, blocks.kv_block)
    num_rows = query.size(1) // key.size(1) * query.size(2)
    few = num_rows <= _FEW_ROWS
    shape = configs.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=operand_type(query.dtype, key.dtype, value.dtype).itemsize,
        by_fused_adds=num_tries(call) == 1,
        max_m=16 if num_rows <= 16 else _FEW_ROWS if few else 128,
        max_n=limit_n,
        num_rows=query.size(0) * query.size(1) * query.size(2),
    )
    tiles = configs.decode_tiles if few else configs.forward_tiles
    found = tiles(configs.device_of(query.device), shape)
    if 0 < table.page_size < min(SPANS_PAGES_FROM, found[0].tile_n):
        found = tuple(
            dict.fromkeys(replace(t, tile_n=min(t.tile_n, table.page_size)) for t in found)
        )
    return found


# Pages smaller than this hold a tile each; larger ones, smaller than a tile, are gathered.
SPANS_PAGES_FROM = 0
