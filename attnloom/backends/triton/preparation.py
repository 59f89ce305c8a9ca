"""What forward, decode and paged launches prepare alike."""

from __future__ import annotations

from attnloom.backends.registry import AttentionCall
from attnloom.backends.triton import configs
from attnloom.backends.triton.arguments import Triple, blank_descriptors, steps
from attnloom.backends.triton.fields import (
    ForwardConfig,
    Tensors,
    num_tries,
    operand_type,
    tma_widths,
)
from attnloom.backends.triton.packed import pack_ints

READY_LIMIT = 4096  # launches that each phase remembers


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
