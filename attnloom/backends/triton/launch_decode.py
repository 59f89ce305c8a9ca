"""Decode launches: when a call is one, into how many splits, and its kernels' arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs, phase
from attnloom.backends.triton.again import ForwardAgain, Starter
from attnloom.backends.triton.arguments import (
    Triple,
    addressed,
    bind,
    stand_ins,
)
from attnloom.backends.triton.decode import decode_kernel
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    overhanging_block,
)
from attnloom.backends.triton.interpreter import INTERPRETED
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import covering, group_lists
from attnloom.backends.triton.merge import combine_kernel
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.preparation import (
    key_value_blanks,
    packed_strides,
    phase_fields,
    shape_class,
)
from attnloom.backends.triton.read_once import hint_for
from attnloom.backends.triton.sizes import MAX_DECODE_ROWS
from attnloom.backends.triton.splits import (
    merge_config,
    merge_options,
    num_splits,
    partial_results,
)

_NO_LISTS = (0.0,) * 8
_OPERANDS = 7  # q, k0 .. v2
_A_PROCESSOR = 2  # programs that share a processor


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses; num_splits, num_rows: extent of the partial results.

    merge: the second kernel, None where there is one split.
    """

    launch: Launcher
    merge: Launcher | None
    tile: configs.Tile
    blanks: tuple[Triple, Triple] | None
    num_units: int
    num_splits: int
    num_rows: int
    shape: tuple[float, ...]
    strides: tuple[float, ...]


_ready: dict[tuple[object, ...], _Ready] = {}


def decode(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the decode kernel and, with more than one split, the merging one. No tensor is empty."""
    return phase.run(call, want_max_scores, _ready, _tiles, _prepare, _launch)


def decode_again(call: AttentionCall, want_max_scores: bool) -> ForwardAgain | None:
    """See `registry.Backend`; None where launches are Triton's."""
    return phase.again(call, want_max_scores, _ready, _restart)


def _restart(
    ready: _Ready, call: AttentionCall, tensors: Tensors, sources: list[torch.Tensor]
) -> Starter | None:
    shared = _shared(ready, tensors)
    args = _arguments(ready, call, tensors, shared, addressed)
    own = shared if ready.num_splits > 1 else ()
    split = ready.launch.restart(args, (*sources, *own))
    if split is None or ready.merge is None:
        return split
    scratch = _Scratch(ready, tensors)
    args = _merging(ready, call, tensors, shared)
    merge = ready.merge.restart(args, (*tensors.outputs(), *own))
    if merge is None:
        return None

    def start(stream: int, addresses: tuple[int, ...]) -> None:
        room, parts = scratch.allocate()
        split(stream, addresses + parts)
        merge(stream, addresses[-3:] + parts)
        del room  # the stream orders its next use

    return start


class _Scratch:
    """Memory for partial results."""

    def __init__(self, ready: _Ready, tensors: Tensors) -> None:
        parts = _shared(ready, tensors)
        room = parts[0]._base
        assert room is not None
        self._like = room.new_empty(1).expand(room.shape)
        self._offsets = tuple(part.data_ptr() - room.data_ptr() for part in parts)

    def allocate(self) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The memory, and the addresses of its parts."""
        room = torch.empty_like(self._like)
        base = room.data_ptr()
        return room, tuple([base + offset for offset in self._offsets])


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    aligned = addresses_aligned(call)
    give = stand_ins if aligned and ready.launch.takes_tensors else addressed
    shared = _shared(ready, tensors)
    ready.launch(aligned, *_arguments(ready, call, tensors, shared, give))
    if ready.merge is not None:
        ready.merge(True, *_merging(ready, call, tensors, shared))


def _arguments(
    ready: _Ready,
    call: AttentionCall,
    tensors: Tensors,
    shared: tuple[torch.Tensor, ...],
    give: Callable[..., Triple],
) -> tuple[object, ...]:
    """Of decode_kernel but for its config. give: descriptors of a tensor, from blank ones."""
    key, value = tensors.key, tensors.value
    sources: tuple[object, ...] = (key, key, key, value, value, value)
    if ready.blanks is not None:
        of_key, of_value = ready.blanks
        sources = (*give(of_key, key), *give(of_value, value))
    lists: tuple[object, ...] = _NO_LISTS
    if call.blocks is not None:
        found = group_lists(call.blocks, call.query.size(1) // key.size(1))
        lists = (found.entries, found.offsets, *found.steps)
    return (
        tensors.query, *sources, *tensors.outputs(), *shared, lists, bind(call.score),
        bind(call.mask), pack_double(call.scale), ready.shape, ready.strides,
    )  # fmt: skip


def _merging(
    ready: _Ready, call: AttentionCall, tensors: Tensors, shared: tuple[torch.Tensor, ...]
) -> tuple[object, ...]:
    """Of combine_kernel but for its config."""
    scale = pack_double(call.scale)
    return (*shared, *tensors.outputs(), scale, ready.shape, ready.strides)


def _shared(ready: _Ready, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """What programs leave the second kernel: partial_acc, partial_m and partial_l. A kernel needs
    addresses too of what it does not use."""
    if ready.num_splits == 1:
        return (tensors.lse,) * 3
    return partial_results(ready.num_units * ready.num_splits * ready.num_rows, tensors)


def _prepare(call: AttentionCall, tensors: Tensors, tile: configs.Tile) -> _Ready:
    query, key, blocks = tensors.query, tensors.key, call.blocks
    batch, heads, q_len, _ = query.shape
    group = heads // key.size(1)
    num_units, num_rows = batch * key.size(1), group * q_len
    num_chunks = -(-num_rows // tile.tile_m)
    device = configs.device_of(query.device)
    splits = num_splits(
        num_units * num_chunks,
        -(-key.size(2) // tile.tile_n),
        _A_PROCESSOR * device.num_processors,
    )
    shape = (
        heads,
        group,
        num_chunks,
        splits,
        q_len,
        key.size(2),
        0 if blocks is None else blocks.q_offset,
        0 if blocks is None else blocks.kv_offset,
        0 if key.size(0) == 1 else 1,
        overhanging_block(call),
        key.size(1),
    )
    config = ForwardConfig(
        **phase_fields(call, tensors, tile),
        SINGLE=splits == 1,
        OVERLAPS=splits > 1 and device.can_overlap,
        HINT=hint_for(
            query.device,
            num_chunks * batch // key.size(0),
            key.nbytes + tensors.value.nbytes,
        ),
    )
    merge = None
    if splits > 1:
        merged = merge_config(config, splits)
        merge = Launcher(combine_kernel, merged, num_units * num_rows, merge_options(merged))
    return _Ready(
        Launcher(decode_kernel, config, num_units * num_chunks * splits, tile.options, _OPERANDS),
        merge,
        tile,
        key_value_blanks(config, tensors, tile.tile_n),
        num_units,
        splits,
        num_rows,
        pack_ints(shape),
        packed_strides(tensors),
    )


def _tiles(call: AttentionCall) -> tuple[configs.Tile, ...]:
    query, key, blocks = call.query, call.key, call.blocks
    limit_n = covering(key.size(2))
    if blocks is not None:
        limit_n = min(limit_n, blocks.kv_block)
    num_rows = query.size(1) // key.size(1) * query.size(2)
    shape = shape_class(call, 16 if num_rows <= 16 else MAX_DECODE_ROWS, limit_n)
    tiles = configs.decode_tiles(configs.device_of(query.device), shape)
    small = num_rows <= 16 and shape.itemsize == 2 and shape.width <= 64
    if not small or not configs.device_of(query.device).has_tma or INTERPRETED:
        return tiles
    # H200, B=32, H=16, 8,192 keys: 247.1 us against 248.9 with 4 warps
    return configs.Tile(16, min(64, limit_n), 2, 3), *tiles
