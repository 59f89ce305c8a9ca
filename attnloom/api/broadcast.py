"""Masks that were built once for all batch entries or heads, by a mask_mod that tells them apart.

The lists of such a mask are those of entry 0: single scores of partial tiles would follow the real
entry, whole tiles entry 0. The program of the mask says which positions it depends on.
"""

from __future__ import annotations

from typing import Any

import torch

from attnloom.errors import ShapeError
from attnloom.ir.node import INPUT_AXES, Axes, BoundProgram
from attnloom.ir.passes.simplify import simplify
from attnloom.trace.names import mod_name

_LIMIT = 4096
_OF_CONSTRUCTORS = {"b": "ids of shape [{batch}, length]", "h": "H={heads}"}
_found: dict[tuple[object, ...], Axes] = {}


def check(block_mask: Any, bound: BoundProgram, query: torch.Tensor) -> None:
    """Raise ShapeError if the mask has one entry for several that its mask_mod tells apart.

    Masks whose lists the caller chose (from_kv_blocks) are taken at their word.
    """
    if not block_mask._lists_of_mod:
        return
    made_for = (1, 1, *block_mask.shape)[-4:-2]
    shared = Axes.NONE
    for axis, have, want in zip((Axes.B, Axes.H), made_for, query.shape[:2], strict=True):
        if have == 1 and want > 1:
            shared |= axis
    if shared and (told_apart := dependencies(bound) & shared):
        _explain(block_mask, told_apart, query)


def dependencies(bound: BoundProgram) -> Axes:
    """The positions on which a program's result depends. An index into a dimension of size 1 does
    not matter, as it is clamped."""
    single = tuple(tuple(size == 1 for size in t.shape) for t in bound.tensors)
    key = (bound.program.digest, single)
    axes = _found.get(key)
    if axes is None:
        if len(_found) >= _LIMIT:
            _found.clear()
        axes = _found[key] = _dependencies(bound, single)
    return axes


def _dependencies(bound: BoundProgram, single: tuple[tuple[bool, ...], ...]) -> Axes:
    program = simplify(bound.program)
    found: list[Axes] = []
    for node in program.nodes:
        axes = INPUT_AXES[str(node.attr)] if node.op == "input" else Axes.NONE
        for place, arg in enumerate(node.args):
            if node.op != "load" or not single[int(node.attr)][place]:  # type: ignore[call-overload]
                axes |= found[arg]
        found.append(axes)
    return found[program.outputs[0]]


def _explain(block_mask: Any, told_apart: Axes, query: torch.Tensor) -> None:
    batch, heads, q_len, kv_len = (1, 1, *block_mask.shape)[-4:]
    batch = query.size(0) if told_apart & Axes.B else batch
    heads = query.size(1) if told_apart & Axes.H else heads
    axis, what, given, size = (
        ("b", "batch entry", "B", batch) if told_apart & Axes.B else ("h", "head", "H", heads)
    )
    name = mod_name(block_mask.mask_mod)
    raise ShapeError(
        f"mask_mod '{name}' depends on {axis}, but its block_mask was built with {given}=None or "
        f"1, so that its tiles are those of {what} 0 alone, and query has {size}. Build it with "
        f"create_block_mask(mask_mod, B={batch}, H={heads}, Q_LEN={q_len}, KV_LEN={kv_len}), or "
        f"give a constructor of BlockMask {_OF_CONSTRUCTORS[axis].format(batch=batch, heads=heads)}"
        "; what does not differ is stored once."
    )
