"""What is different about a call over a cache: sequences of their own lengths, perhaps in pages."""

from __future__ import annotations

import torch

from attnloom.api import autocast, validate
from attnloom.api.autograd import num_dispatch_modes, transforms_active
from attnloom.api.launch import Launch
from attnloom.block_mask import BlockMask
from attnloom.errors import DeviceError, OptionError, ShapeError, UnsupportedError, counted
from attnloom.masking.decode import DecodeMask
from attnloom.masking.views import query_shift
from attnloom.paged import PagedKV, PagedKVCache, PageTable
from attnloom.paged.table import check_contents

CACHES = (PagedKV, PagedKVCache)


def opened(query: torch.Tensor, cache: PagedKV | PagedKVCache, value: object) -> PagedKV:
    """The keys, values and table that a query attends to.

    Raises:
        OptionError: a value was given too, the layer of a cache is not said, or sequences of a
            batch lost their pages since.
    """
    if value is not None:
        raise OptionError(
            f"value is a {type(value).__name__}, but key is a {type(cache).__name__}, which holds "
            "the values too. Call flex_attention(query, cache, ...)."
        )
    if isinstance(cache, PagedKV):
        cache.check_fresh()
        return cache
    if cache.num_layers != 1:
        raise OptionError(
            f"this cache has {counted(cache.num_layers, 'layer')}; pass batch.layer(i) of the "
            "batch that extend returned."
        )
    validate.check_tensor_arguments((("query", query),))
    if query.dim() != 4:
        raise ShapeError(f"query is {list(query.shape)}; it must be [B, Hq, Q_LEN, D].")
    return cache.layer(0, query.size(2))


def table_of(block_mask: DecodeMask, table: PageTable | None) -> PageTable:
    """The table of a call that was given a DecodeMask.

    Raises:
        OptionError: its keys lie in pages, whose table knows the lengths.
    """
    if table is not None:
        raise OptionError(
            "block_mask is a DecodeMask, but the cache knows the lengths of its sequences itself. "
            "Pass the BlockMask that for_decode was called on."
        )
    return block_mask.table


def check(
    query: torch.Tensor, key: torch.Tensor, table: PageTable, block_mask: BlockMask | None
) -> None:
    """A table and a mask against the query and the keys they are used with.

    Raises:
        ShapeError, DeviceError, OptionError (not an attnloom.BlockMask).
    """
    if query.size(0) != table.batch:
        raise ShapeError(
            f"query has batch {query.size(0)}, the cache {counted(table.batch, 'sequence')}; entry "
            "b of query belongs to sequence b. Make the batch of the sequences that query has."
        )
    if table.device != query.device:
        raise DeviceError(
            f"the lengths of the sequences are on {table.device}, query on {query.device}; all "
            "must be on one device. Move them with .to(device)."
        )
    check_contents(table, query.size(2), key.size(2) if table.pages is None else key.size(0))
    if block_mask is None:
        return
    validate.check_mask_type(block_mask)
    q_len, kv_len = block_mask.shape[-2:]
    longest = table.max_length
    if min(q_len, kv_len) < longest:
        raise ShapeError(
            f"block_mask was made for Q_LEN {q_len} and KV_LEN {kv_len}, but sequences are up to "
            f"{counted(longest, 'token')} long. It is the mask of whole sequences, read where the "
            "queries stand: build it once with create_block_mask(mask_mod, B, H, LONGEST, "
            f"LONGEST), LONGEST at least {longest}."
        )
    shift = query_shift(block_mask.mask_mod)
    if shift:
        raise ShapeError(
            f"block_mask begins at query {shift} of another, by `rows` or by indexing. Over a "
            "cache it is looked up where each query stands in its sequence, and would be moved "
            "twice: pass the mask of whole sequences."
        )
    validate.check_mask_batch(block_mask, query)


def check_inference(*tensors: torch.Tensor) -> None:
    """Raise UnsupportedError where somebody will ask for a gradient, or looks on."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "attention over a cache has no backward, and an input or a captured tensor requires "
            "grad. Run it under torch.no_grad() or torch.inference_mode(), or train without the "
            "cache."
        )
    if transforms_active() or num_dispatch_modes():
        raise UnsupportedError(
            "attention over a cache does not run under torch.func transforms, torch.export or "
            "other dispatch modes. Call it outside of them."
        )


def attention(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    want_max_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run a launch; as `autograd.attention`, for inference only."""
    if autocast.is_on(query):
        with autocast.switched_off(query):
            result = launch.forward(query, key, value, tensors, want_max_scores)
    else:
        result = launch.forward(query, key, value, tensors, want_max_scores)
    return result.out, result.lse, result.max_scores if want_max_scores else None
