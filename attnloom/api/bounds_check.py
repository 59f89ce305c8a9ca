"""kernel_options={"debug_bounds": True}: every index into a captured tensor, checked before launch.

Kernels clamp an index that is out of range, so that no lane reads outside a tensor; what is a
mistake of the mod then shows as a wrong number. This check finds it and names the tensor. Only
indices that matter count: at live scores, and on the side of a `where` that is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnloom.api.token_map import live_scores, positions, row_chunks, tile_tokens
from attnloom.backends.registry import AttentionCall
from attnloom.errors import ShapeError
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram
from attnloom.trace.names import mod_name, name_of

Mod = Callable[..., Any] | None
_ARGUMENTS = {"b": "b", "h": "h", "q": "q_idx", "kv": "kv_idx"}


def check(call: AttentionCall, score_mod: Mod, mask_mod: Mod) -> None:
    """Check every captured load of a call, in chunks of query rows.

    Raises:
        ShapeError: an index is out of range; names the mod, the captured tensor and the position.
    """
    for at in _parts(call):
        shape = torch.broadcast_shapes(*(x.shape for x in at.values()))
        if call.score is not None:
            live = live_scores(call, at)
            everywhere = torch.ones((), dtype=torch.bool, device=call.query.device)
            scores = torch.zeros(shape, device=call.query.device)
            _check_program(
                call.score, {"score": scores, **at}, everywhere if live is None else live, score_mod
            )
        if call.mask is not None and call.blocks is not None:
            partial, _ = tile_tokens(call.blocks, at)
            shifted = {
                **at,
                "q": at["q"] + call.blocks.q_offset,
                "kv": at["kv"] + call.blocks.kv_offset,
            }
            _check_program(call.mask, shifted, partial, mask_mod)


def _parts(call: AttentionCall) -> Iterator[dict[str, torch.Tensor]]:
    """Positions of all scores, a chunk at a time; over a cache those of each sequence."""
    query, table = call.query, call.table
    if table is None:
        keys = call.key.size(2)
        for start, stop in row_chunks(query, keys):
            yield positions(query[:, :, start:stop], keys, start)
        return
    for b, (length, count) in enumerate(zip(*table.on_host(query.size(2)), strict=True)):
        first = max(0, length - count)  # rows before the sequence see nothing
        rows = query[b : b + 1, :, first - (length - count) : count]
        for start, stop in row_chunks(rows, length):
            at = positions(rows[:, :, start:stop], length, first + start)
            yield at | {"b": at["b"] + b}


def _check_program(
    bound: BoundProgram, inputs: dict[str, torch.Tensor], live: torch.Tensor, mod: Mod
) -> None:
    program = bound.program
    loads = [i for i, node in enumerate(program.nodes) if node.op == "load" and node.args]
    if not loads:
        return
    inner = (None,) * len(program.reductions)
    demand = _demand(bound, inputs, live)
    for load in loads:
        node = program.nodes[load]
        indices = _evaluate(bound, inputs, node.args)
        tensor = bound.tensors[int(node.attr)]  # type: ignore[call-overload]
        for dim, index in enumerate(indices):
            size = tensor.size(dim)
            bad = ((index < -size) | (index >= size)) & demand[load]
            if bool(bad.any()):
                _explain(bad, index, live[(..., *inner)], (int(node.attr), dim), bound, inputs, mod)  # type: ignore[call-overload]


def _demand(
    bound: BoundProgram, inputs: dict[str, torch.Tensor], live: torch.Tensor
) -> dict[int, torch.Tensor]:
    """For each node the lanes whose result depends on it, with trailing reduction dimensions."""
    nodes, inner = bound.program.nodes, len(bound.program.reductions)
    demand = {bound.program.outputs[0]: live[(..., *(None,) * inner)]}
    for index in reversed(range(len(nodes))):
        wanted = demand.get(index)
        if wanted is None:
            continue
        node = nodes[index]
        parts = dict.fromkeys(node.args, wanted)
        if node.op == "where":
            condition, yes, no = node.args
            taken = _evaluate(bound, inputs, (condition,))[0]
            parts = {condition: wanted}
            for arm, lanes in ((yes, wanted & taken), (no, wanted & ~taken)):
                parts[arm] = parts[arm] | lanes if arm in parts else lanes
        for arg, lanes in parts.items():
            demand[arg] = demand[arg] | lanes if arg in demand else lanes
    return demand


def _evaluate(
    bound: BoundProgram, inputs: dict[str, torch.Tensor], nodes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Values of some nodes, of the four axes and then one dimension a reduction, broadcast."""
    program = dataclasses.replace(bound.program, outputs=nodes)
    inner = len(program.reductions)
    with torch.no_grad():
        values = interpret(dataclasses.replace(bound, program=program), inputs)
    # What varies along a reduction has these dimensions already, and perhaps none before them.
    varies = [bool(program.axes[node] & ~Axes.ALL) for node in nodes]
    return [
        v if along else v[(..., *(None,) * inner)] for v, along in zip(values, varies, strict=True)
    ]


def _explain(
    bad: torch.Tensor,
    index: torch.Tensor,
    live: torch.Tensor,
    where: tuple[int, int],
    bound: BoundProgram,
    inputs: dict[str, torch.Tensor],
    mod: Mod,
) -> None:
    slot, dim = where
    bad, index, _ = torch.broadcast_tensors(bad, index, live)
    at = bad.nonzero()[0].tolist()
    value = int(index[tuple(at)])
    place = []
    for axis, (name, argument) in enumerate(_ARGUMENTS.items()):
        spots = inputs[name].flatten()
        place.append(f"{argument}={int(spots[at[axis] if bad.size(axis) > 1 else 0])}")
    tensor = bound.tensors[slot]
    captured = name_of(mod, tensor)
    shown = f"captured tensor {(captured and repr(captured)) or f'number {slot}'}"
    raise ShapeError(
        f"mod '{mod_name(mod)}' indexes {shown} of shape {list(tensor.shape)} with "
        f"{value} in dimension {dim}, at {', '.join(place)}; the range is "
        f"{-tensor.size(dim)} to {tensor.size(dim) - 1}. Make the tensor larger, or clamp the "
        "index inside the mod. (Without debug_bounds such an index is clamped.)"
    )
