"""What forward, decode and paged launches prepare alike."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import Triple, blank_descriptors, steps
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    num_tries,
    operand_type,
    shared_fields,
    tma_widths,
)
from attnloom.backends.triton.packed import pack_ints

_WARPGROUP_ROWS = 64  # fewer are multiplied by other instructions


def shape_class(call: AttentionCall, max_m: int, max_n: int) -> configs.Shape:
    """What a choice of tiles depends on, for tiles of at most max_m x max_n."""
    query, key, value = call.query, call.key, call.value
    return configs.Shape(
        width=max(sum(configs.chunks(query.size(3))), sum(configs.chunks(value.size(3)))),
        itemsize=operand_type(query.dtype, key.dtype, value.dtype).itemsize,
        by_fused_adds=num_tries(call) == 1,
        max_m=max_m,
        max_n=max_n,
        num_rows=query.size(0) * query.size(1) * query.size(2),
    )


def packed_strides(tensors: Tensors) -> tuple[float, ...]:
    """Strides of query, key, value and out as kernels take them."""
    return pack_ints(step for tensor in tensors.operands for step in steps(tensor))


def key_value_blanks(
    config: ForwardConfig, tensors: Tensors, tile_n: int
) -> tuple[Triple, Triple] | None:
    """Descriptors of key and value without addresses; None where pointers are used."""
    widths = tma_widths(config)
    if widths is None:
        return None
    return (
        blank_descriptors(tensors.key, tile_n, widths[0]),
        blank_descriptors(tensors.value, tile_n, widths[1]),
    )


def phase_fields(call: AttentionCall, tensors: Tensors, tile: configs.Tile) -> dict[str, Any]:
    """Fields of ForwardConfig, with wide chunks where halves are multiplied a few rows at a time:
    beside those, tiles of 16 and 32 columns gave wrong results in pages (docs/log.md)."""
    fields = shared_fields(call, tensors, tile)
    if fields["OPERAND"] in (tl.float16, tl.bfloat16) and tile.tile_m < _WARPGROUP_ROWS:
        for letter, width in (("D", tensors.query.size(3)), ("E", tensors.value.size(3))):
            fields |= {f"{letter}{i}": n for i, n in enumerate(wide_chunks(width))}
    return fields


def wide_chunks(width: int) -> tuple[int, int, int]:
    """Chunks of a head dimension, each of 64 or 128 columns up to a width of 256."""
    if width > 256:
        return configs.chunks(width)
    whole, rest = divmod(-(-width // 64), 2)
    first, second = (128, 128) if whole == 2 else (128, 64 * rest) if whole else (64, 0)
    return first, second, 0
