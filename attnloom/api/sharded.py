"""flex_attention of DTensors: batch entries and heads lie on several ranks, nothing is sent.

Every rank attends with what it has. Masks and mods are written for the whole problem: a rank's part
of a mask is cut out of it, and mods see b and h of the whole. What needs more than that (a length
that is sharded, sums that are not finished, key heads that a rank's query heads do not read) is
refused and has to be redistributed first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnloom.api import broadcast, pipeline, validate
from attnloom.api.call import Call
from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError, UnsupportedError, counted
from attnloom.ir.node import DType
from attnloom.masking import versions
from attnloom.masking.captures import map_captures
from attnloom.masking.views import noop_mask, shift_entries
from attnloom.trace.dtensor import is_dtensor
from attnloom.trace.tracer import trace_mask, trace_score

_AXES = ("batch", "heads")
_SHARE = "Redistribute it first, for example x.redistribute(placements=[Shard(1)]) for heads."
# mask -> share -> (what the mask was made of when it was cut, the part)
_parts: weakref.WeakKeyDictionary[BlockMask, dict[Any, tuple[Any, BlockMask]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank has: entries first .. first + count - 1 of the batch and of the heads."""

    first: tuple[int, int]
    count: tuple[int, int]


def check_plain(query: Any) -> None:
    """Raise UnsupportedError for a DTensor over a cache, which knows nothing of ranks."""
    if is_dtensor(query):
        raise UnsupportedError(
            "query is a DTensor and key is a cache, which lies on one rank. Make a cache of the "
            "key heads of each rank, and call flex_attention with query.to_local()."
        )


def run(call: Call, want_max_scores: bool) -> pipeline.Outputs:
    """out, lse and max_scores as DTensors that are placed as query is.

    Raises:
        UnsupportedError: a placement that would need communication; a captured tensor that would
            get a part of its gradient. ShapeError: heads do not divide as their groups do; else as
            `pipeline.run`.
    """
    query, key, value, score_mod, block_mask, *_ = call
    inputs = {"query": query, "key": key, "value": value}
    _check_kinds(inputs)
    validate.check_inputs(query, key, value, call.enable_gqa)
    factor = validate.read_scale(call.scale, query.size(3))
    shared = _check_placements(inputs)
    share = _share_of(query)
    _check_groups(share, query, key, shared)
    sums = _sums(query)
    if score_mod is not None:
        validate.check_score_mod(score_mod)
        validate.check_extent(score_mod, query, key, False)
        score_mod = _local_mod(score_mod, query, share, sums)
    if block_mask is not None:
        block_mask = _local_mask(block_mask, query, key, share)
    local = call.on(query.to_local(), _local(key, shared), _local(value, shared))
    local = local._replace(score_mod=score_mod, block_mask=block_mask, scale=factor)
    found = pipeline.run(local, want_max_scores)
    out, lse, max_scores = (None if x is None else _whole(x, query) for x in found)
    assert out is not None and lse is not None, "a call has both"
    return out, lse, max_scores


def _check_kinds(inputs: dict[str, Any]) -> None:
    """All are DTensors of one mesh."""
    from torch.distributed.tensor import DTensor

    plain = [name for name, x in inputs.items() if not isinstance(x, DTensor)]
    if plain:
        sharded = next(name for name in inputs if name not in plain)
        raise UnsupportedError(
            f"{sharded} is a DTensor and {plain[0]} is a {type(inputs[plain[0]]).__name__}; query, "
            "key and value must be DTensors of one mesh, or none of them. Make it one with "
            f"distribute_tensor({plain[0]}, mesh, placements)."
        )
    mesh = inputs["query"].device_mesh
    for name, x in inputs.items():
        if x.device_mesh != mesh:
            raise UnsupportedError(
                f"query is on {mesh} and {name} on {x.device_mesh}; all three must be on one mesh."
            )


def _check_placements(inputs: dict[str, Any]) -> tuple[bool, ...]:
    """Batch and heads sharded alike; all else whole.

    Returns: for each dimension of the mesh, whether key and value are whole there while query is
    sharded: one batch entry or one head of theirs serves all.
    """
    from torch.distributed.tensor import Replicate, Shard

    for name, x in inputs.items():
        for placement in x.placements:
            if type(placement) is Replicate:
                continue
            if type(placement) is not Shard:
                raise UnsupportedError(
                    f"{name} is placed as {placement!r}; attention takes finished, evenly cut "
                    f"tensors. {_SHARE}"
                )
            if placement.dim > 1:
                axis = ("length", "head dimension")[placement.dim - 2]
                raise UnsupportedError(
                    f"{name} is sharded along its {axis} (dimension {placement.dim}); a query's "
                    f"softmax needs whole rows of scores, so that only the batch (0) and the heads "
                    f"(1) may be. {_SHARE}"
                )
    query, key, value = inputs.values()
    shared = []
    places = zip(query.placements, key.placements, value.placements, strict=True)
    for mesh_dim, (of_query, of_key, of_value) in enumerate(places):
        serves_all = type(of_query) is Shard and key.size(of_query.dim) == 1
        whole = type(of_key) is Replicate and serves_all
        if of_key != of_value or (of_key != of_query and not whole):
            raise UnsupportedError(
                f"on dimension {mesh_dim} of the mesh query is placed as {of_query!r}, key as "
                f"{of_key!r} and value as {of_value!r}; they must be placed alike (keys and values "
                f"of one head, or of one batch entry, may be whole). {_SHARE}"
            )
        shared.append(whole)
    return tuple(shared)


def _share_of(x: Any) -> _Share:
    """Which batch entries and heads of a DTensor this rank has."""
    first, count = [0, 0], list(x.shape[:2])
    for mesh_dim, placement in enumerate(x.placements):
        if placement.is_shard():
            dim, ranks = placement.dim, x.device_mesh.size(mesh_dim)
            piece = -(-count[dim] // ranks)  # as torch.chunk cuts
            start = min(piece * x.device_mesh.get_local_rank(mesh_dim), count[dim])
            first[dim], count[dim] = first[dim] + start, min(piece, count[dim] - start)
    return _Share((first[0], first[1]), (count[0], count[1]))


def _check_groups(share: _Share, query: Any, key: Any, shared: tuple[bool, ...]) -> None:
    """The key heads of a rank are those that its query heads read."""
    if key.size(1) == 1 and any(shared):
        return
    group = query.size(1) // key.size(1)
    of_key = _share_of(key)
    if (of_key.first[1] * group, of_key.count[1] * group) != (share.first[1], share.count[1]):
        raise ShapeError(
            f"query has {counted(query.size(1), 'head')}, key has {key.size(1)}, and they are "
            f"sharded: this rank has heads {_range(share)} of query and {_range(of_key)} of key, "
            f"and {group} query heads share a key head. Let the number of ranks divide the heads "
            "of key."
        )


def _range(share: _Share) -> str:
    return f"{share.first[1]} to {share.first[1] + share.count[1] - 1}"


def _sums(query: Any) -> tuple[bool, ...]:
    """For each dimension of the mesh, whether gradients of what all ranks share are summed there:
    each rank adds that of its batch entries and heads."""
    return tuple(placement.is_shard() for placement in query.placements)


def _local(x: Any, summed: tuple[bool, ...]) -> Tensor:
    """What this rank has of a DTensor; its gradient is summed over some dimensions of the mesh."""
    from torch.distributed.tensor import Partial

    if not any(summed):
        return x.to_local()
    placements = [Partial() if s else p for s, p in zip(summed, x.placements, strict=True)]
    # A redistribution to what it is already: its backward finishes the sums.
    return x.redistribute(placements=x.placements).to_local(grad_placements=placements)


def _whole(x: Tensor, query: Any) -> Any:
    """The DTensor of which each rank computed its batch entries and heads."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*query.shape[:2], *x.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x.contiguous(),
        query.device_mesh,
        query.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def _local_mod(
    score_mod: Callable[..., Any], query: Any, share: _Share, sums: tuple[bool, ...]
) -> Callable[..., Any]:
    """The score_mod of the whole problem, for a rank's batch entries and heads."""

    def localise(tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        if any(not placement.is_replicate() for placement in tensor.placements):  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"score_mod captures a DTensor of shape {list(tensor.shape)} that is placed as "
                f"{tensor.placements}; mods read captured tensors by positions of the whole "  # type: ignore[attr-defined]
                "problem. Capture a replicated one: "
                "bias.redistribute(placements=[Replicate()])."
            )
        return _local(tensor, sums)

    mod = map_captures(score_mod, Tensor, localise, with_globals=True)
    if torch.is_grad_enabled() and any(sums):
        dtype = DType.F64 if query.dtype is torch.float64 else DType.F32
        bound = trace_score(mod, dtype, query.device)
        for tensor, spec in zip(bound.tensors, bound.program.tensors, strict=True):
            if spec.requires_grad and _stays_partial(tensor):
                raise UnsupportedError(
                    f"score_mod captures a tensor of shape {list(tensor.shape)} that requires grad "
                    "and is no DTensor, while query is sharded: each rank would get the part of "
                    "its gradient that comes of the rank's own heads and batch entries. Capture a "
                    "replicated DTensor: distribute_tensor(bias, mesh, [Replicate()])."
                )
    return shift_score(mod, *share.first)


def _stays_partial(tensor: Tensor) -> bool:
    """Whether its gradient reaches a leaf without passing a DTensor, which would sum it."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or hasattr(node, "variable"):
            return True
        if node not in seen and "ToTorchTensor" not in node.name():
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return False


def shift_score(mod: Callable[..., Any], first_batch: int, first_head: int) -> Callable[..., Any]:
    """The score_mod at (b + first_batch, h + first_head)."""
    if not first_batch and not first_head:
        return functools.partial(mod)  # without notes on the sizes of the whole problem
    return functools.partial(shifted_score, mod, first_batch, first_head)


def shifted_score(
    mod: Callable[..., Any],
    first_batch: int,
    first_head: int,
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    """The mod, seen from a rank whose batch entries and heads begin there."""
    return mod(score, b + first_batch, h + first_head, q_idx, kv_idx)


def _local_mask(block_mask: Any, query: Any, key: Any, share: _Share) -> BlockMask:
    """The mask of a rank's batch entries and heads; cut once."""
    validate.check_mask(block_mask, query, key)
    if block_mask.mask_mod is not noop_mask:
        bound = trace_mask(block_mask.mask_mod, query.device)
        versions.check(block_mask, bound)
        broadcast.check(block_mask, bound, query)
    if share == _Share((0, 0), tuple(query.shape[:2])):
        return block_mask
    source = (block_mask.lists(), block_mask.mask_mod)
    known = _parts.setdefault(block_mask, {})
    found = known.get(share)
    if found is None or any(x is not y for x, y in zip(found[0], source, strict=True)):
        found = known[share] = (source, _cut(block_mask, share))
    return found[1]


def _cut(block_mask: BlockMask, share: _Share) -> BlockMask:
    sizes = (1, 1, *block_mask.shape)[-4:-2]
    spans = [
        slice(None) if size == 1 else slice(first, first + count)
        for size, first, count in zip(sizes, share.first, share.count, strict=True)
    ]
    part = block_mask[tuple(spans[4 - len(block_mask.shape) :])]
    # A dimension of size 1 is not cut, but the mod may still ask where it is.
    rest = [first if size == 1 else 0 for size, first in zip(sizes, share.first, strict=True)]
    mod = shift_entries(part.mask_mod, rest[0], rest[1])
    return part if mod is part.mask_mod else part._derive(part.lists(), mod, part._batch_dims)
