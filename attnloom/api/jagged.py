"""flex_attention of nested tensors (torch.jagged): every sequence attends to itself.

The sequences of a nested tensor lie one after the other in memory, so that a call is one over
packed documents: nothing is padded, cut or copied. Mods see each sequence as a batch entry of its
own: b is its number, q_idx and kv_idx count from its first token.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnloom.api import pipeline, validate
from attnloom.api.call import Call
from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import OptionError, ShapeError, UnsupportedError, counted
from attnloom.masking import extent
from attnloom.masking.arguments import check_mask_mod, check_tensor, read_int
from attnloom.masking.dynamo import outside_graph
from attnloom.masking.known_masks import KeyRanges, packed_documents, packed_mod
from attnloom.masking.views import MaskMod
from attnloom.trace.names import known_as, mod_name

_HOW = "torch.nested.nested_tensor(sequences, layout=torch.jagged), each of them [length, H, D]"


@dataclass(frozen=True, slots=True)
class _Packing:
    """Sequences of queries and of their keys, one after the other.

    ranges: the keys of each query. tables: the sequence of each query, its first query, its first
    key; [total_q] each. isolated: the mask that keeps sequences apart.
    """

    ranges: KeyRanges
    tables: tuple[Tensor, Tensor, Tensor]
    isolated: BlockMask


# offsets of queries -> (offsets of keys, how often torch saw either change, their packing)
_packings: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# mask -> offsets that it was made of
_made_of: weakref.WeakKeyDictionary[BlockMask, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()


def is_nested(query: Any, key: Any, value: Any) -> bool:
    """Whether one of them is a nested tensor, of either layout."""
    # Written out: it is asked on every call.
    return (
        getattr(query, "is_nested", False)
        or getattr(key, "is_nested", False)
        or getattr(value, "is_nested", False)
    )


@outside_graph
def create_nested_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """The BlockMask of a mask_mod inside each sequence of a nested tensor.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, True where a score is kept; b is the number
            of the sequence, q_idx and kv_idx count from its first query and key.
        B: None, 1 or the number of sequences; the mask is always built for each.
        H: query heads; None for a mask that is the same for all.
        q_nt: nested tensor [B, Hq, jagged, D] (torch.jagged) that the mask will be used with, or
            another of the same offsets.
        kv_nt: nested tensor of keys, where their lengths differ from those of queries.
        BLOCK_SIZE: tile in tokens, one size or (query, key), powers of two from 16.
        _compile: accepted for torch's sake; the builder needs no compilation.
    Returns:
        BlockMask of shape [1, H or 1, total_q, total_kv] for flex_attention of nested tensors of
        these offsets. Scores between different sequences are masked.
    Raises:
        TraceError: mask_mod cannot be traced. UnsupportedError, ShapeError: not nested tensors of
        this form, or of different numbers of sequences.
    Source: Dong et al. 2024, arXiv:2412.05496, sec. 3.3 (jagged sequences); the name and the
        arguments are those of torch 2.6.
    """
    del _compile
    check_mask_mod(mask_mod)
    named: dict[str, Any] = {"q_nt": q_nt, "kv_nt": q_nt if kv_nt is None else kv_nt}
    for name, x in named.items():
        check_tensor(name, x)
        _check_form(name, x)
    _check_numbers(named)
    count = q_nt.size(0)
    if B is not None and read_int("B", B) not in (1, count):
        raise ShapeError(
            f"B is {B}, q_nt has {counted(count, 'sequence')}; a mask of nested tensors is built "
            f"for every sequence: B is {count}, 1 or None."
        )
    if H is not None and read_int("H", H) not in (1, q_nt.size(1)):
        raise ShapeError(
            f"H is {H}, q_nt has {counted(q_nt.size(1), 'head')}; H is the number of query heads, "
            "or None for a mask that is the same for all."
        )
    extent.check(mask_mod, {"batch": count, "heads": q_nt.size(1)})
    offsets = (named["q_nt"].offsets(), named["kv_nt"].offsets())
    packing = _packing(*offsets)
    mod = known_as(packed_mod(packing.ranges, packing.tables, mask_mod), mod_name(mask_mod))
    total_q, total_kv = packing.isolated.shape[-2:]
    mask = create_block_mask(
        mod, None, H, total_q, total_kv, device=q_nt.device, BLOCK_SIZE=BLOCK_SIZE
    )
    _made_of[mask] = offsets
    return mask


def run(call: Call, want_max_scores: bool) -> pipeline.Outputs:
    """out [B, Hq, jagged, Dv], lse and max_scores [B, Hq, jagged], nested as query is.

    Raises:
        UnsupportedError: tensors of another form; a dense one beside nested ones. ShapeError:
        sequences that do not belong together; else as `pipeline.run`.
    """
    query, key, value, score_mod, block_mask, *_ = call
    inputs = {"query": query, "key": key, "value": value}
    _check_inputs(inputs)
    packing = _packing(query.offsets(), key.offsets())
    if block_mask is not None:
        _check_mask(block_mask, query, key)
    if score_mod is not None:
        validate.check_score_mod(score_mod)
        extent.check(score_mod, {"batch": query.size(0), "heads": query.size(1)})
        score_mod = functools.partial(packed_score, score_mod, packing.tables)
    mask = packing.isolated if block_mask is None else block_mask
    packed = call.on(*(x.values().unsqueeze(0) for x in (query, key, value)))
    packed = packed._replace(score_mod=score_mod, block_mask=mask)
    found = pipeline.run(packed, want_max_scores)
    out, lse, max_scores = (None if x is None else _nested_as(x, query) for x in found)
    assert out is not None and lse is not None, "a call has both"
    return out, lse, max_scores


def packed_score(
    mod: Callable[..., Any],
    tables: tuple[Tensor, Tensor, Tensor],
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    """The score_mod inside the sequence that query q_idx of all belongs to."""
    del b
    number, first_q, first_kv = tables
    return mod(score, number[q_idx], h, q_idx - first_q[q_idx], kv_idx - first_kv[q_idx])


def _nested_as(x: Tensor, query: Any) -> Tensor:
    """[1, Hq, total_q, ...] as the sequences of query."""
    return torch.nested.nested_tensor_from_jagged(x.squeeze(0), query.offsets(), jagged_dim=2)


def _packing(offsets_q: Tensor, offsets_kv: Tensor) -> _Packing:
    """Found once for the layers and steps that share the offsets."""
    changes = (offsets_q._version, offsets_kv._version)
    known = _packings.get(offsets_q)
    if known is not None and known[0]() is offsets_kv and known[1] == changes:
        return known[2]
    lengths = (int(offsets_q[-1]), int(offsets_kv[-1]))
    # Copies: the dictionary's values must not keep its keys alive.
    cumulative = (offsets_q.detach().clone(), offsets_kv.detach().clone())
    ranges, tables = packed_documents(*cumulative, lengths, causal=False)
    small = tuple(t.to(torch.int32) if max(lengths) < 2**31 else t for t in tables)
    isolated = BlockMask.from_cu_seqlens(*cumulative)
    packing = _Packing(ranges, small, isolated)  # type: ignore[arg-type]
    _packings[offsets_q] = (weakref.ref(offsets_kv), changes, packing)
    return packing


def _check_inputs(inputs: dict[str, Any]) -> None:
    for name, x in inputs.items():
        validate.check_is_tensor(name, x)
    nested = next(name for name, x in inputs.items() if x.is_nested)
    for name, x in inputs.items():
        if not x.is_nested:
            raise UnsupportedError(
                f"{nested} is a nested tensor and {name} is not; query, key and value must all be "
                f"nested, with one sequence for each batch entry. Make it one with {_HOW}, and "
                "transpose(1, 2)."
            )
        _check_form(name, x)
    query, key, value = inputs.values()
    _check_numbers({"query": query, "key": key})
    if key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
        raise ShapeError(
            f"key has sequences of lengths {_lengths(key)}, value of {_lengths(value)}; every key "
            "needs its value, so these must be equal."
        )


def _check_form(name: str, x: Any) -> None:
    """A nested tensor [B, H, jagged, D] without holes."""
    if not x.is_nested:
        raise UnsupportedError(f"{name} is not a nested tensor. Make one with {_HOW}.")
    if x.layout is not torch.jagged:
        raise UnsupportedError(
            f"{name} is a nested tensor with the layout {x.layout}; flex_attention takes "
            f"torch.jagged. Make it with {_HOW}, or pack the sequences into one row and keep them "
            "apart with BlockMask.from_cu_seqlens."
        )
    ragged = [dim for dim, size in enumerate(x.shape) if not isinstance(size, int)]
    if x.dim() != 4 or ragged != [2]:
        fix = " Use transpose(1, 2)." if x.dim() == 4 and ragged == [1] else ""
        raise ShapeError(
            f"{name} is a nested tensor of shape {_shape(x)}; it must be [batch, heads, jagged "
            f"length, head_dim].{fix}"
        )
    if x.lengths() is not None:
        raise UnsupportedError(
            f"{name} is a nested tensor with holes between its sequences (as "
            f"torch.nested.narrow makes them). Use {name}.contiguous()."
        )


def _check_numbers(named: dict[str, Any]) -> None:
    """As many sequences of keys as of queries."""
    (one, x), (other, y) = named.items()
    if x.size(0) != y.size(0):
        raise ShapeError(
            f"{one} has {counted(x.size(0), 'sequence')}, {other} has {y.size(0)}; every sequence "
            "of queries has its own of keys, so these must be equal (a sequence may be empty)."
        )


def _check_mask(block_mask: Any, query: Any, key: Any) -> None:
    """It was built for sequences of these lengths: it keeps them apart."""
    validate.check_mask_type(block_mask)
    made_of = _made_of.get(block_mask)
    fix = "Build it with attnloom.create_nested_block_mask(mask_mod, None, None, query, key)."
    if made_of is None:
        raise OptionError(
            f"query is a nested tensor, and block_mask was made for Q_LEN {block_mask.shape[-2]} "
            f"and KV_LEN {block_mask.shape[-1]} of one sequence; it says nothing of where others "
            f"begin. {fix}"
        )
    for name, x, offsets in zip(("query", "key"), (query, key), made_of, strict=True):
        if x.offsets() is not offsets and not torch.equal(x.offsets(), offsets):
            raise ShapeError(
                f"block_mask was made for sequences of lengths {_differences(offsets)}, {name} has "
                f"{_lengths(x)}. {fix}"
            )


def _lengths(x: Any) -> str:
    return _differences(x.offsets())


def _differences(offsets: Tensor) -> str:
    lengths = offsets.diff().tolist()
    return str(lengths) if len(lengths) <= 8 else f"{str(lengths[:8])[:-1]}, ...]"


def _shape(x: Any) -> str:
    return str([size if isinstance(size, int) else "jagged" for size in x.shape]).replace("'", "")
