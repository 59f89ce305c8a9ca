"""attnloom::flex_forward and attnloom::flex_backward, as torch.library operators.

torch.export, make_fx, FakeTensor, selective checkpointing and sharding see these two ordinary
operators (`autograd.py` registers their derivatives). A mod enters as the text of its structure
plus flat lists of captured tensors, integers and reals; a BlockMask as its tensors plus static
fields. No Python callable crosses this line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch

from attnloom.api import planning, structure
from attnloom.api.launch import Launch, Numbers, flat_gradients
from attnloom.block_mask import BlockLists
from attnloom.errors import OptionError
from attnloom.ir.node import Program
from attnloom.plan.problem import KernelOptions, compute_type

Tensors = tuple[torch.Tensor, ...]

_COMMON = (
    "Tensor query, Tensor key, Tensor value, str score, str mask, Tensor[] tensors, "
    "SymInt[] integers, float[] reals, Tensor? row_offsets, Tensor? entries, SymInt[] blocks, "
    "float scale, str options"
)
library = torch.library.Library("attnloom", "FRAGMENT")
library.define(
    f"flex_forward({_COMMON}, bool want_max_scores) -> (Tensor out, Tensor lse, Tensor max_scores)"
)
library.define(
    f"flex_backward({_COMMON}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dtensors)"
)
# Static fields of BlockLists in the order of the operators' argument `blocks`.
_BLOCK_FIELDS = tuple(
    f.name for f in dataclasses.fields(BlockLists) if f.name not in ("row_offsets", "entries")
)


def call_forward(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: Tensors,
    want_max_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run a launch through attnloom::flex_forward, below autograd."""
    args = (query, key, value, *_arguments(launch, tensors))
    with torch._C._AutoDispatchBelowAutograd():
        out, lse, max_scores = torch.ops.attnloom.flex_forward(*args, want_max_scores)
    return out, lse, max_scores if want_max_scores else None


def call_backward(
    launch: Launch,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors],
    saved: Tensors,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Tensors:
    """Run a launch's backward through attnloom::flex_backward, below autograd."""
    query, key, value, tensors = inputs
    args = (query, key, value, *_arguments(launch, tensors), *saved, dout, dlse)
    with torch._C._AutoDispatchBelowAutograd():
        dq, dk, dv, captured = torch.ops.attnloom.flex_backward(*args)
    return (dq, dk, dv, *captured)


def _arguments(launch: Launch, tensors: Tensors) -> tuple[Any, ...]:
    """What follows query, key and value in both operators."""
    plan, lists = launch.plan, launch.blocks
    integers: list[int] = []
    reals: list[float] = []
    for program, numbers in ((plan.score, launch.score_numbers), (plan.mask, launch.mask_numbers)):
        for dtype, number in zip(program.numbers if program else (), numbers, strict=True):
            (reals if dtype.is_float else integers).append(number)  # type: ignore[arg-type]
    return (
        structure.encode(plan.score),
        structure.encode(plan.mask),
        list(tensors),
        integers,
        [float(x) for x in reals],
        None if lists is None else lists.row_offsets,
        None if lists is None else lists.entries,
        [] if lists is None else [getattr(lists, name) for name in _BLOCK_FIELDS],
        launch.scale,
        json.dumps(dataclasses.asdict(launch.options)),
    )


def _numbers(programs: Sequence[Program | None], integers: Any, reals: Any) -> list[Numbers]:
    """Numbers of each program in slot order, from the operators' two lists."""
    next_integer, next_real = iter(integers), iter(reals)
    return [
        tuple(next(next_real if d.is_float else next_integer) for d in p.numbers) if p else ()
        for p in programs
    ]


@functools.lru_cache(maxsize=256)
def _options(text: str) -> KernelOptions:
    try:
        return KernelOptions(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"an attnloom operator was given options it cannot read: {text!r} ({error})."
        ) from error


def launch_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: str,
    mask: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[int],
    reals: Sequence[float],
    row_offsets: torch.Tensor | None,
    entries: torch.Tensor | None,
    blocks: Sequence[int],
    scale: float,
    options: str,
) -> Launch:
    """The launch that the arguments both operators share describe."""
    programs = (structure.decode(score), structure.decode(mask))
    lists = None
    if row_offsets is not None and entries is not None:
        fields = dict(zip(_BLOCK_FIELDS, blocks, strict=True))
        chosen = bool(fields.pop("chosen"))
        lists = BlockLists(row_offsets=row_offsets, entries=entries, chosen=chosen, **fields)
    count = len(programs[0].tensors) if programs[0] else 0
    numbers = _numbers(programs, integers, reals)
    bound = (
        planning.bind(programs[0], tuple(tensors[:count]), numbers[0]),
        planning.bind(programs[1], tuple(tensors[count:]), numbers[1]),
    )
    inputs = (query, key, value)
    return planning.plan_launch(inputs, *bound, lists, scale, _options(options))[0]


def _forward_impl(*args: Any) -> Tensors:
    *common, want_max_scores = args
    launch = launch_of(*common)
    query, key, value, _, _, tensors = common[:6]
    result = launch.forward(query, key, value, tuple(tensors), want_max_scores)
    out, lse, max_scores = result.out, result.lse, result.max_scores
    if max_scores is None:
        max_scores = lse.new_empty(0)
    return out.contiguous(), lse.contiguous(), max_scores.contiguous()


def _backward_impl(*args: Any) -> tuple[Any, ...]:
    *common, out, lse, dout, dlse = args
    launch = launch_of(*common)
    query, key, value, _, _, tensors = common[:6]
    grads = launch.backward(query, key, value, tuple(tensors), (out, lse), dout, dlse)
    dq, dk, dv, *captured = (g.contiguous() for g in flat_gradients(launch, grads))
    return dq, dk, dv, list(captured)


def _forward_fake(*args: Any) -> Tensors:
    query, key, value = args[:3]
    real = compute_type(query.dtype, key.dtype, value.dtype).torch
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    lse = query.new_empty(rows, dtype=real)
    max_scores = query.new_empty(rows if args[-1] else (0,), dtype=real)
    return out, lse, max_scores


def _backward_fake(*args: Any) -> tuple[Any, ...]:
    tensors = args[5]
    program = structure.decode(args[3])
    specs = program.tensors if program else ()
    captured = [_fresh(t) for t, s in zip(tensors, specs, strict=False) if s.requires_grad]
    return (*(_fresh(x) for x in args[:3]), captured)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


library.impl("flex_forward", _forward_impl, "CompositeExplicitAutograd")
library.impl("flex_backward", _backward_impl, "CompositeExplicitAutograd")
torch.library.register_fake("attnloom::flex_forward", _forward_fake, lib=library)
torch.library.register_fake("attnloom::flex_backward", _backward_fake, lib=library)
