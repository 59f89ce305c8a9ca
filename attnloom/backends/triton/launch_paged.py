"""Launches over a cache: what depends on the table's shape, and its kernels' arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs, phase
from attnloom.backends.triton.arguments import Triple, addressed, bind
from attnloom.backends.triton.config import KernelConfig
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    launch_key,
    shared_fields,
    target_of,
)
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.launcher import Launcher, addresses_aligned, are_aligned
from attnloom.backends.triton.lists import covering
from attnloom.backends.triton.merge import combine_kernel
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.paged import paged_kernel
from attnloom.backends.triton.preparation import (
    key_value_blanks,
    packed_strides,
    shape_class,
)
from attnloom.backends.triton.read_once import hint_for
from attnloom.backends.triton.shared_lists import lists_of_groups
from attnloom.backends.triton.splits import (
    merge_config,
    merge_options,
    num_splits,
    partial_results,
)
from attnloom.block_mask import BlockLists
from attnloom.paged.table import PageTable

_FEW_ROWS = 64  # queries times heads of a group; more are tiled as a forward
_OPERANDS = 7  # q, k0 .. v2
_NO_LISTS = (0.0,) * 8
_FAR = 2**31 - 1
_FAR_ROOM = 1 << 24  # elements of a page at most, as far as offsets of pages are concerned
# Head dimensions of keys and of values that a device has computed right. Tiles of 16 and 32 columns
# were once wrong on an H200 and right under the interpreter (docs/log.md): what no device has seen
# since is left to other backends.
_SEEN = {2: ((64, 96, 128, 192), (40, 64, 128)), 4: ((32, 64, 128), (32, 64, 128))}


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


def unseen(call: AttentionCall) -> str | None:
    """Why the kernel cannot be trusted with a call, None if it can."""
    blocks, group = call.blocks, call.query.size(1) // max(call.key.size(1), 1)
    if blocks is not None and blocks.chosen and blocks.num_heads > 1 and group > 1:
        return (
            f"its lists of blocks were chosen for each of {blocks.num_heads} heads; kernels over a "
            f"cache read the lists of the {group} heads that share keys as one, which a mask_mod "
            "tells apart. Build the mask with create_block_mask, or choose blocks by key head."
        )
    if INTERPRETED:
        return None
    tensors = (call.query, call.key, call.value)
    dims = (call.key.size(3), call.value.size(3))
    seen = _SEEN.get(call.query.element_size(), ((), ()))
    if len({t.dtype for t in tensors}) == 1 and dims[0] in seen[0] and dims[1] in seen[1]:
        return None
    return (
        f"key and value have head dimensions {dims[0]} and {dims[1]} in {call.key.dtype}; kernels "
        f"over a cache take {_SEEN[2][0]} and {_SEEN[2][1]} in halves, {_SEEN[4][0]} in float32, "
        "all three tensors in one dtype."
    )


def attend(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the kernel and, with more than one split, the merging one. No tensor is empty."""
    return phase.run(call, want_max_scores, _ready, _tiles, _prepare, _launch, _key)


def _key(call: AttentionCall, tensors: Tensors) -> tuple[object, ...]:
    table = call.table
    assert table is not None
    pages = table.pages
    return (
        launch_key(call, tensors),
        target_of(call),
        None if pages is None else (pages.size(1), table.page_size),
        table.counts is None,
        None if call.blocks is None else (call.blocks.grid.num_q_blocks, call.blocks.num_heads),
    )


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
        partial = partial_results(ready.num_partials, tensors)
    scale, outputs = pack_double(call.scale), tensors.outputs()
    places = _table_argument(table)
    ready.launch(
        addresses_aligned(call) and are_aligned(places), tensors.query, *sources, *outputs,
        *partial, lists, places, bind(call.score), bind(call.mask), scale, ready.shape,
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
    device = configs.device_of(query.device)
    num_chunks = -(-group // (tile.tile_m // queries))
    num_programs = batch * kv_heads * num_chunks * num_tiles
    splits = num_splits(
        # of two tiles that few queries may straddle one is empty
        num_programs // (2 if straddles and num_tiles == 2 else 1),
        -(-capacity // tile.tile_n),
        2 * device.num_processors,
    )
    shape = (
        heads,
        group,
        num_chunks,
        splits,
        q_len,
        capacity,
        num_tiles,
        0 if key.size(0) == 1 else 1,
        0 if table.pages is None else table.pages.size(1),
        1 if blocks is None else blocks.grid.num_q_blocks,
        1 if blocks is None else blocks.q_block,
        kv_heads,
    )
    gather = 0 < table.page_size < tile.tile_n
    fields = shared_fields(call, tensors, tile)
    fields |= {"MAY_MASK": True, "USE_TMA": fields["USE_TMA"] and not gather}
    if query.element_size() == 2:
        for letter, tensor in (("D", key), ("E", value)):
            chunks = _chunks(tensor.size(3))
            fields |= {f"{letter}{i}": width for i, width in enumerate(chunks)}
    readers = num_chunks * num_tiles * _num_sharing(call)
    config = PagedConfig(
        **fields,
        SINGLE=splits == 1,
        OVERLAPS=splits > 1 and device.can_overlap,
        HINT=hint_for(query.device, readers, _bytes_read(call)),
        PAGE=table.page_size,
        GATHER=gather,
        FAR=max(t.stride(0) * (t.size(0) - 1) for t in (key, value)) + _FAR_ROOM > _FAR,
        QUERIES=queries,
        HEADS=tile.tile_m // queries,
        HAS_COUNTS=table.counts is not None,
    )
    num_rows = batch * heads * q_len
    merged = merge_config(config, splits)
    merge = Launcher(combine_kernel, merged, num_rows, merge_options(merged))
    return _Ready(
        Launcher(paged_kernel, config, num_programs * splits, tile.options, _OPERANDS),
        merge if splits > 1 else None,
        key_value_blanks(config, tensors, tile.tile_n),
        num_rows * splits if splits > 1 else 0,
        pack_ints(shape),
        packed_strides(tensors),
    )


def _chunks(width: int) -> tuple[int, int, int]:
    """Chunks of a head dimension of halves, each of 64 or 128: rows of them are swizzled over 128
    bytes, as all tiles that have been seen right."""
    if width > 256:
        return configs.chunks(width)
    whole, rest = divmod(-(-width // 64), 2)
    first, second = (128, 128) if whole == 2 else (128, 64 * rest) if whole else (64, 0)
    return first, second, 0


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


def _num_sharing(call: AttentionCall) -> int:
    """Rows of the batch with the same keys, as far as the host knows."""
    table = call.table
    assert table is not None
    return 1 if table.pages is not None else call.query.size(0) // call.key.size(0)


def _bytes_read(call: AttentionCall) -> int:
    """Of keys and values at most, each once."""
    key, value = call.key, call.value
    rows = min(key.size(0) * key.size(2), call.query.size(0) * _capacity(call))
    return rows * key.size(1) * (key.size(3) + value.size(3)) * key.element_size()


def _tiles(call: AttentionCall) -> tuple[configs.Tile, ...]:
    query, table, blocks = call.query, call.table, call.blocks
    assert table is not None
    limit_n = covering(_capacity(call))
    if blocks is not None:
        limit_n = min(limit_n, blocks.kv_block)
    num_rows = query.size(1) // call.key.size(1) * query.size(2)
    few = num_rows <= _FEW_ROWS
    shape = shape_class(call, 16 if num_rows <= 16 else _FEW_ROWS if few else 128, limit_n)
    device = configs.device_of(query.device)
    if not few:
        return configs.forward_tiles(device, shape)
    tiles = configs.decode_tiles(device, shape)
    if num_rows > 16 or shape.itemsize != 2 or INTERPRETED:
        return tiles
    if shape.width <= 64:
        # small programs, many to a processor: H200, 4,096 keys, 129 us against 150 with 128 keys
        # and 4 warps, and 134 against 169 in pages of 16
        return configs.Tile(16, min(64, limit_n), 2, 3), *tiles
    if device.has_tma and shape.width <= 128 and table.page_size in (16, 32) and limit_n >= 64:
        # H200, 32 heads on 8, 4,096 keys: 128.5 us against 128.8 with 4 warps in pages of 16, 128.3
        # against 128.4 and 128.5 in pages of 32
        return configs.Tile(16, 64, 2, 3), *tiles
    return tiles
