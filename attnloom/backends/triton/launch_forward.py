"""Forward launches: configuration, arguments and what is remembered between calls.

A call with shapes, strides, dtypes and mods that were seen before finds a _Ready: everything but
the addresses. A configuration that a device refuses for resources is replaced by the next, for
good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl

from attnloom.backends.registry import AttentionCall, ForwardResult
from attnloom.backends.triton import configs, phase
from attnloom.backends.triton.again import ForwardAgain, Starter
from attnloom.backends.triton.arguments import (
    Triple,
    addressed,
    bind,
    blank_descriptors,
    stand_ins,
)
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    chunk_widths,
    overhanging_block,
)
from attnloom.backends.triton.forward import forward_kernel
from attnloom.backends.triton.launcher import Launcher, addresses_aligned
from attnloom.backends.triton.lists import covering, work_lists
from attnloom.backends.triton.packed import pack_double, pack_ints
from attnloom.backends.triton.preparation import (
    key_value_blanks,
    packed_strides,
    phase_fields,
    shape_class,
)
from attnloom.backends.triton.sizes import heads_together

_NO_LISTS = (0.0,) * 8
_OPERANDS = 9  # q0 .. v2


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch but for its addresses.

    tile: see configs.py. blanks: descriptors of query, key and value where TMA is used.
    """

    launch: Launcher
    tile: configs.Tile
    blanks: tuple[Triple, Triple, Triple] | None
    shape: tuple[float, ...]
    strides: tuple[float, ...]


_ready: dict[tuple[object, ...], _Ready] = {}


def forward(call: AttentionCall, want_max_scores: bool) -> ForwardResult:
    """Run the forward kernel. Tensors may have any strides; none is empty."""
    return phase.run(call, want_max_scores, _ready, _tiles, _prepare, _launch)


def forward_again(call: AttentionCall, want_max_scores: bool) -> ForwardAgain | None:
    """See `registry.Backend`; None where launches are Triton's."""
    return phase.again(call, want_max_scores, _ready, _restart)


def _restart(
    ready: _Ready, call: AttentionCall, tensors: Tensors, sources: list[torch.Tensor]
) -> Starter | None:
    return ready.launch.restart(_arguments(ready, call, tensors, addressed), sources)


def _launch(ready: _Ready, call: AttentionCall, tensors: Tensors) -> None:
    aligned = addresses_aligned(call)
    give = stand_ins if aligned and ready.launch.takes_tensors else addressed
    ready.launch(aligned, *_arguments(ready, call, tensors, give))


def _arguments(
    ready: _Ready, call: AttentionCall, tensors: Tensors, give: Callable[..., Triple]
) -> tuple[object, ...]:
    """Of forward_kernel but for its config. give: descriptors of a tensor, from blank ones."""
    query, key, value = tensors.query, tensors.key, tensors.value
    sources: tuple[object, ...] = (query, query, query, key, key, key, value, value, value)
    if ready.blanks is not None:
        of_query, of_key, of_value = ready.blanks
        sources = (*give(of_query, query), *give(of_key, key), *give(of_value, value))
    lists: tuple[object, ...] = _NO_LISTS
    blocks = call.blocks
    if blocks is not None:
        found = work_lists(blocks, ready.tile.tile_m)
        # a kernel needs an address, also to read nothing from
        entries = blocks.entries if blocks.entries.numel() else blocks.entries.new_zeros(1)
        lists = (entries, found.work, *found.steps)
    return (
        *sources, *tensors.outputs(), lists, bind(call.score), bind(call.mask),
        pack_double(call.scale), ready.shape, ready.strides,
    )  # fmt: skip


def _prepare(call: AttentionCall, tensors: Tensors, tile: configs.Tile) -> _Ready:
    query, key, blocks = tensors.query, tensors.key, call.blocks
    batch, heads, q_len, _ = query.shape
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
        heads_together(call, configs.device_of(query.device)),
        overhanging_block(call),
    )
    fields = phase_fields(call, tensors, tile)
    config = ForwardConfig(**fields, LAST_FIRST=_takes_last_first(call, fields["OPERAND"]))
    blanks = None
    others = key_value_blanks(config, tensors, tile.tile_n)
    if others is not None:
        blanks = (blank_descriptors(query, tile.tile_m, chunk_widths(config, "D")), *others)
    return _Ready(
        Launcher(forward_kernel, config, num_tiles * batch * heads, tile.options, _OPERANDS),
        tile,
        blanks,
        pack_ints(shape),
        packed_strides(tensors),
    )


def _takes_last_first(call: AttentionCall, operand: tl.dtype) -> bool:
    """Whether lists are taken from their end, for 0.1% less error (H200, causal, D = 64).

    Of weights rounded to halves those of a row's maximum so far are exact, and causal rows have few
    keys in their last block. Not where positions make a score: what ALiBi makes largest comes last,
    and is to be added to what is small (0.1% of error in halves, 25% in float32)."""
    if call.blocks is None or operand not in (tl.float16, tl.bfloat16):
        return False
    nodes = () if call.score is None else call.score.program.nodes
    return not any(node.op == "input" and node.attr in ("q", "kv") for node in nodes)


def _tiles(call: AttentionCall) -> tuple[configs.Tile, ...]:
    query, key, blocks = call.query, call.key, call.blocks
    limit_m, limit_n = covering(query.size(2)), covering(key.size(2))
    if blocks is not None:
        limit_m, limit_n = min(limit_m, blocks.q_block), min(limit_n, blocks.kv_block)
    shape = shape_class(call, limit_m, limit_n)
    return configs.forward_tiles(configs.device_of(query.device), shape)
