"""Forward launches: configuration, arguments and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a _Ready: everything but
the addresses. A configuration that a device refuses for resources is replaced by the next, for
good."""

from __future__ import annotations

from dataclasses import dataclass

from triton.runtime.errors import OutOfResources

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import bind, descriptors, steps
from attnloom.backends.triton.fields import (
    Chunks,
    ForwardConfig,
    Tensors,
    launch_key,
    operand_type,
    overhanging_block,
    shared_fields,
    tma_widths,
)
from attnloom.backends.triton.forward import forward_kernel
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import work_lists
from attnloom.backends.triton.packed import pack_double, pack_ints

_NO_LISTS = (0.0,) * 8


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses.

    tile: see configs.py; next_tiles: what to try if refused. widths: chunks of D and of Dv where
    TMA is used.
    """

    launch: Launcher
    tile: configs.Tile
    next_tiles: tuple[configs.Tile, ...]
    widths: tuple[Chunks, Chunks] | None
    shape: tuple[float, ...]
    strides: tuple[float, ...]


_READY_LIMIT = 4096
_ready: dict[tuple[object, ...], _Ready] = {}


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the forward kernel. Tensors may have any strides; none is empty."""
    tensors = Tensors.of(call, want_max_scores)
    key = launch_key(call, tensors)
    ready = _ready.get(key)
    if ready is None:
        ready = _remember(key, _prepare(call, tensors, _tiles(call)))
    while True:
        try:
            _launch(ready, call, tensors)
            return tensors.result()
        except OutOfResources:
            if not ready.next_tiles:
                raise
            ready = _remember(key, _prepare(call, tensors, ready.next_tiles))


def _remember(key: tuple[object, ...], ready: _Ready) -> _Ready:
    if len(_ready) >= _READY_LIMIT:
        _ready.clear()
    _ready[key] = ready
    return ready


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    tile = ready.tile
    query, key, value = tensors.query, tensors.key, tensors.value
    sources: tuple[object, ...] = (query, query, query, key, key, key, value, value, value)
    if ready.widths is not None:
        widths, value_widths = ready.widths
        sources = (
            *descriptors(query, tile.tile_m, widths),
            *descriptors(key, tile.tile_n, widths),
            *descriptors(value, tile.tile_n, value_widths),
        )
    lists: tuple[object, ...] = _NO_LISTS
    blocks = call.blocks
    if blocks is not None:
        found = work_lists(blocks, tile.tile_m)
        # a kernel needs an address, also to read nothing from
        entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
        lists = (entries, found.work, *found.steps)
    ready.launch(
        addresses_aligned(call), *sources, *tensors.outputs(), lists, bind(call.score),
        bind(call.mask), pack_double(call.scale), ready.shape, ready.strides,
    )  # fmt: skip


def _prepare(call: AttentionCall, tensors: Tensors, tiles: tuple[configs.Tile, ...]) -> _Ready:
    query, key, blocks = tensors.query, tensors.key, call.blocks
    batch, heads, q_len, _ = query.shape
    tile, *rest = tiles
    num_tiles = -(-q_len // tile.tile_m)
    shape = (
        heads,
        heads // key.size(1),
        batch,
        num_tiles,
        q_len,
        key.size(2),
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        0 if key.size(0) == 1 else 1,
        _heads_together(call, configs.device_of(query.device)),
        overhanging_block(call),
    )
    strides = [step for t in tensors.operands for step in steps(t)]
    config = ForwardConfig(**shared_fields(call, tensors, tile))
    return _Ready(
        Launcher(forward_kernel, config, num_tiles * batch * heads, tile.options),
        tile,
        tuple(rest),
        tma_widths(config),
        pack_ints(shape),
        pack_ints(strides),
    )


def _tiles(call: AttentionCall) -> tuple[configs.Tile, ...]:
    query, key, value, blocks = call.query, call.key, call.value, call.blocks
    limit_m, limit_n = _covering(query.size(2)), _covering(key.size(2))
    if blocks is not None:
        limit_m, limit_n = min(limit_m, blocks.q_block), min(limit_n, blocks.kv_block)
    shape = configs.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=operand_type(query.dtype, key.dtype, value.dtype).itemsize,
        max_m=limit_m,
        max_n=limit_n,
        num_rows=query.size(0) * query.size(1) * query.size(2),
    )
    return configs.forward_tiles(configs.device_of(query.device), shape)


def _covering(length: int) -> int:
    """The smallest tile side that covers a length."""
    return max(16, 1 << (length - 1).bit_length())


def _heads_together(call: AttentionCall, device: configs.Device) -> int:
    """Query heads whose keys and values share half of the L2 cache; whole groups of a key head.

    With a mask more heads are taken together: programs differ in length, and the longest of many
    heads first leaves less of a tail."""
    key, value = call.key, call.value
    group = call.query.size(1) // key.size(1)
    bytes_a_head = key.size(2) * (
        key.size(3) * key.element_size() + value.size(3) * value.element_size()
    )
    together = max(1, device.l2_bytes // 2 // max(bytes_a_head, 1))
    if call.blocks is not None:
        together *= 4
    return min(together, 64) * group
