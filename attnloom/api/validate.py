"""Every mistake that a caller of flex_attention can make, found before anything is launched.

A message says what is wrong in the caller's names and values, why, and what to write instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from numbers import Real

import torch

from attnloom.block_mask import BlockMask
from attnloom.errors import (
    DeviceError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
    counted,
)
from attnloom.ir.node import BoundProgram
from attnloom.masking import extent, short_captures
from attnloom.masking.arguments import check_flag, shown
from attnloom.paged import PagedBatch, PageTable
from attnloom.trace.names import mod_name, name_of

DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
EIGHT_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_warned: set[str] = set()


def check_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    enable_gqa: bool,
    in_pages: bool = False,
) -> None:
    """Ranks, sizes, dtypes and devices of query, key and value.

    Args:
        in_pages: key and value are [num_pages, Hkv, page_size, D].
    Raises:
        ShapeError, DtypeError, DeviceError, UnsupportedError (nested tensors), OptionError (an
        argument is not a tensor).
    """
    check_tensor_arguments((("query", query), ("key", key), ("value", value)))
    # [B, Hq, Q_LEN, D], [Bkv, Hkv, KV_LEN, D], [Bkv, Hkv, KV_LEN, Dv]
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        _explain_rank(query, key, value)
    if q[3] != k[3] or k[:3] != v[:3] or not q[3] or not v[3]:
        _explain_sizes(query, key, value)
    if q[0] != k[0] and k[0] != 1 and not in_pages:
        raise ShapeError(
            f"query has batch {q[0]}, key and value have {k[0]}; the batches must be equal, or 1 "
            f"for a key and value that every batch entry shares. {_shapes(query, key, value)}"
        )
    if type(enable_gqa) is not bool:
        check_flag("enable_gqa", enable_gqa)
    if q[1] != k[1]:
        _check_heads(query, key, value, enable_gqa)
    if not query.device == key.device == value.device:
        raise DeviceError(
            f"query is on {query.device}, key on {key.device}, value on {value.device}; all three "
            "must be on one device. Move them with .to(device)."
        )


def check_tensor_arguments(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Each is a strided tensor of a dtype that attention takes; raises as `check_inputs`."""
    for name, tensor in named:
        check_is_tensor(name, tensor)
        if tensor.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor, which goes with nested keys and values alone. Over a "
                "cache put the tokens of all sequences of a step into one row: see PagedBatch."
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} has the layout {tensor.layout}; flex_attention takes plain strided "
                f"tensors. Use {name}.to_dense(), and a block_mask for what is absent."
            )
        if tensor.dtype not in DTYPES and tensor.dtype not in EIGHT_BITS:
            raise DtypeError(
                f"{name} is {tensor.dtype}; attention takes float64, float32, bfloat16, float16, "
                "float8_e4m3fn and float8_e5m2. Convert it first, for example "
                f"{name}.to(torch.bfloat16)."
            )


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise OptionError for a plain tensor whose memory was given back."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return
    watched = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    if watched or tensor._is_zerotensor():
        return
    if tensor.numel() and not tensor.data_ptr():
        raise OptionError(
            f"{name} of shape {list(tensor.shape)} has no memory: its storage was resized to 0 "
            "bytes, as sharded training leaves parameters between uses. Call flex_attention while "
            "it is there."
        )


def check_is_tensor(name: str, tensor: object) -> None:
    """Raise OptionError unless it is a tensor."""
    if isinstance(tensor, PagedBatch):
        raise OptionError(
            f"{name} is a PagedBatch, which has keys and values of every layer; pass those of one, "
            "flex_attention(query, batch.layer(i), ...)."
        )
    if not isinstance(tensor, torch.Tensor):
        raise OptionError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    return f"Got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}."


def _explain_rank(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has {counted(tensor.dim(), 'dimension')}; it must have 4: [batch, heads, "
                "length, head_dim]. Use unsqueeze, or view and transpose for a packed projection. "
                f"{_shapes(query, key, value)}"
            )


def _explain_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    got = _shapes(query, key, value)
    if query.size(3) != key.size(3):
        raise ShapeError(
            f"query has head_dim {query.size(3)}, key has {key.size(3)}; they are multiplied, so "
            f"they must be equal (only value's may differ). {got}"
        )
    for axis, what in enumerate(("batch", "heads", "length")):
        if key.size(axis) != value.size(axis):
            raise ShapeError(
                f"key has {what} {key.size(axis)}, value has {value.size(axis)}; every key needs "
                f"its value, so these must be equal. {got}"
            )
    name = "value" if query.size(3) else "query"
    raise ShapeError(f"{name} has head_dim 0; it must be at least 1. {got}")


def _check_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    hq, hkv = query.size(1), key.size(1)
    got = _shapes(query, key, value)
    if not enable_gqa:
        raise ShapeError(
            f"query has {counted(hq, 'head')}, key and value have {hkv}; without grouped queries "
            "these must be equal. Pass enable_gqa=True to share each key head between query "
            f"heads. {got}"
        )
    if hkv == 0 or hq % hkv:
        raise ShapeError(
            f"query has {counted(hq, 'head')}, key has {hkv}; query heads must be a multiple of "
            f"key heads. {got}"
        )


def read_scale(scale: object, head_dim: int) -> float:
    """The factor on query @ key^T: `scale`, or 1 / sqrt(head_dim) when it is None.

    Raises:
        OptionError: not a finite number.
    """
    if scale is None:
        return head_dim**-0.5
    if type(scale) is float or (isinstance(scale, Real) and not isinstance(scale, bool)):
        number = float(scale)
        if math.isfinite(number):
            return number
    raise OptionError(
        f"scale is {shown(scale)}; it must be a finite Python number or None (1 / sqrt(head_dim)). "
        "For a learned or per-head scale multiply query by it, or capture it in score_mod."
    )


def check_mask(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    """Lengths, batch, heads and device of a mask against the inputs it is used with.

    Raises:
        ShapeError, DeviceError, OptionError (not an attnloom.BlockMask).
    """
    check_mask_type(block_mask)
    q_len, kv_len = block_mask.shape[-2:]
    if query.size(2) != q_len or key.size(2) != kv_len:
        _explain_lengths(block_mask, query, key)
    check_mask_batch(block_mask, query)


def check_mask_type(block_mask: object) -> None:
    """Raise OptionError unless it is an attnloom.BlockMask."""
    if not isinstance(block_mask, BlockMask):
        _explain_mask_type(block_mask)


def check_mask_batch(block_mask: BlockMask, query: torch.Tensor) -> None:
    """Batch, heads and device of a mask against query; raises ShapeError, DeviceError."""
    # a mask from blocks without batch or head dimensions broadcasts over them
    num_batches, num_heads, q_len, kv_len = (1, 1, *block_mask.shape)[-4:]
    batch, heads = query.shape[:2]
    for what, have, want in (("batch", num_batches, batch), ("heads", num_heads, heads)):
        if have != 1 and have != want:
            raise ShapeError(
                f"block_mask was made for {what} {have}, query has {want}; they must be equal, or "
                f"1 for a mask that is the same for all. Build it with "
                f"create_block_mask(mask_mod, {batch}, {heads}, {q_len}, {kv_len}), or with None "
                f"in place of {want} to share it. Got block_mask {list(block_mask.shape)}, query "
                f"{list(query.shape)}."
            )
    device = block_mask.device
    if device != query.device:
        raise DeviceError(
            f"block_mask is on {device}, query on {query.device}; move the mask once with "
            f"block_mask.to('{query.device}')."
        )


def _explain_lengths(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    q_len, kv_len = block_mask.shape[-2:]
    rows, keys = query.size(2), key.size(2)
    if (query.size(1), key.size(1)) == (q_len, kv_len):
        raise ShapeError(
            f"query {list(query.shape)} and key {list(key.shape)} have the lengths of block_mask, "
            f"{q_len} and {kv_len}, in dimension 1, where heads belong: attention takes [batch, "
            "heads, length, head_dim]. Pass query.transpose(1, 2), and key and value likewise."
        )
    text = (
        f"block_mask was made for Q_LEN {q_len} and KV_LEN {kv_len}, but query has length {rows} "
        f"and key {keys}. A mask is tied to token positions, so it is never cut or stretched "
        "silently. "
    )
    if rows > q_len or keys > kv_len:
        fix = (
            f"It does not cover these inputs: build one with create_block_mask(mask_mod, B, H, "
            f"{rows}, {keys})."
        )
    else:
        fix = (
            f"For the first {counted(rows, 'query')} and {counted(keys, 'key')} use "
            f"block_mask.crop({rows}, {keys})"
        )
        if rows < q_len:
            fix += f"; for queries from position p on (decoding) use block_mask.rows(p, p + {rows})"
            if keys < kv_len:
                fix += f".crop({rows}, {keys})"
        fix += f"; or build create_block_mask(mask_mod, B, H, {rows}, {keys})."
    raise ShapeError(text + fix)


def _explain_mask_type(block_mask: object) -> None:
    kind = f"{type(block_mask).__module__}.{type(block_mask).__qualname__}"
    if kind == "torch.nn.attention.flex_attention.BlockMask":
        fix = (
            "Import create_block_mask from attnloom instead of torch.nn.attention.flex_attention; "
            "its arguments are the same."
        )
    elif callable(block_mask):
        fix = "Pass create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) instead of the mask_mod."
    elif isinstance(block_mask, torch.Tensor):
        fix = "Make a BlockMask of a dense bool mask with attnloom.BlockMask.from_dense(mask)."
    else:
        fix = "Build one with attnloom.create_block_mask."
    raise OptionError(f"block_mask is a {kind}; it must be an attnloom.BlockMask. {fix}")


def check_outputs(return_lse: object, return_aux: object) -> None:
    """Raise OptionError unless return_lse is a bool and return_aux an AuxRequest (torch's will do)
    or None."""
    check_flag("return_lse", return_lse)
    asked = [getattr(return_aux, name, None) for name in ("lse", "max_scores")]
    if return_aux is not None and not all(isinstance(x, bool) for x in asked):
        raise OptionError(
            f"return_aux is {shown(return_aux)}; it must be an AuxRequest, for example "
            "attnloom.AuxRequest(lse=True, max_scores=False), or None."
        )


def check_score_mod(score_mod: object) -> None:
    """Raise OptionError if score_mod is not something that can be called."""
    if not callable(score_mod):
        raise OptionError(
            f"score_mod is a {type(score_mod).__name__}; it must be a function "
            "score_mod(score, b, h, q_idx, kv_idx) that returns the new score, or None."
        )


def warn_of_mask_gradients(mask_mod: object, bound: BoundProgram) -> None:
    """Warn, once for each mask_mod and tensor, of gradients that somebody waits for in vain."""
    if not torch.is_grad_enabled():
        return
    for tensor in bound.tensors:
        if tensor.requires_grad:
            _warn_of_mask_gradient(mask_mod, tensor)


def _warn_of_mask_gradient(mask_mod: object, tensor: torch.Tensor) -> None:
    name = name_of(mask_mod, tensor)
    what = repr(name) if name else "a tensor"
    text = (
        f"mask_mod '{mod_name(mask_mod)}' captures {what} of shape {list(tensor.shape)}, which "
        "requires grad; a mask keeps a score or does not, so that attention gives it no gradient. "
        "To learn it, let a score_mod subtract something smooth in it; if no gradient is meant, "
        "capture it detached (.detach())."
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, short_captures.caller_level())


def check_extent(
    score_mod: object, query: torch.Tensor, key: torch.Tensor, over_cache: bool
) -> None:
    """Raise ShapeError where score_mod is for other sizes. Over a cache lengths are those of the
    sequences, which only the device knows."""
    if hasattr(score_mod, extent.ATTRIBUTE):
        sizes: dict[extent.Axis, int] = {"batch": query.size(0), "heads": query.size(1)}
        if not over_cache:
            sizes |= {"Q_LEN": query.size(2), "KV_LEN": key.size(2)}
        extent.check(score_mod, sizes)


def reach(query: torch.Tensor, key: torch.Tensor, table: PageTable | None) -> dict[str, int]:
    """How many values each position of a call has, by "b", "h", "q" and "kv"; over a cache queries
    and keys have the positions of the longest sequence."""
    q_len, kv_len = query.size(2), key.size(2)
    if table is not None:
        longest = table.max_length if table.pages is not None else min(table.max_length, kv_len)
        q_len = kv_len = longest
    return {"b": query.size(0), "h": query.size(1), "q": q_len, "kv": kv_len}
