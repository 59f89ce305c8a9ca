"""Exact ranges of the parts of a mask that depend on queries alone, or on keys alone.

Such a part (`doc[b, q_idx]`, `kv_idx // 64`) is evaluated at every position, in chunks, and kept as
minimum and maximum of each block, of every 4 blocks, of every 16, and so on: a pyramid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attnloom.ir.builder import extract
from attnloom.ir.interpret import interpret
from attnloom.ir.node import Axes, BoundProgram, Program
from attnloom.masking.lists import TileGrid

FANOUT = 4
_CHUNK_LANES = 1 << 20
_LEAVES = ("input", "const", "number")
_SIDES = {"q": Axes.B | Axes.H | Axes.Q, "kv": Axes.B | Axes.H | Axes.KV}

Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pyramid:
    """Ranges of one node of a program.

    side: "q" or "kv". levels[n]: (lo, hi) of FANOUT ** n blocks, each [Bm, Hm, blocks], where a
    dimension is 1 if the node does not depend on it.
    """

    side: str
    levels: tuple[Range, ...]

    def at(self, level: int, b: torch.Tensor, h: torch.Tensor, block: torch.Tensor) -> Range:
        """(lo, hi) [n] at the given entries, heads and blocks of a level."""
        lo, hi = self.levels[level]
        size_b, size_h, size = lo.shape
        index = block.clamp(max=size - 1) if size > 1 else torch.zeros_like(block)
        if size_h > 1:
            index = index + h * size
        if size_b > 1:
            index = index + b * (size_h * size)
        return lo.flatten()[index], hi.flatten()[index]


@dataclass(frozen=True, slots=True)
class OneSidedPart:
    """Some nodes of a program, and a program whose outputs they are, in this order."""

    nodes: tuple[int, ...]
    bound: BoundProgram

    def at(
        self, side: str, b: torch.Tensor, h: torch.Tensor, positions: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Values of the nodes at positions of the side; inputs broadcast."""
        values = interpret(self.bound, {"b": b, "h": h, side: positions})
        return dict(zip(self.nodes, values, strict=True))


def one_sided_nodes(program: Program) -> dict[int, str]:
    """The largest subexpressions without both q and kv -> "q" or "kv"; bare inputs and constants
    are left out."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    stack = list(program.outputs)
    while stack:
        index = stack.pop()
        if index in seen:
            continue
        seen.add(index)
        node, axes = program.nodes[index], program.axes[index]
        side = next((s for s, allowed in _SIDES.items() if not axes & ~allowed), None)
        if side is None:
            stack.extend(node.args)
        elif node.op not in _LEAVES:
            found[index] = side
    return found


def one_sided_parts(bound: BoundProgram) -> dict[str, OneSidedPart]:
    """The part of a program on each side that has one."""
    nodes = one_sided_nodes(bound.program)
    out = {}
    for side in _SIDES:
        indices = tuple(i for i, s in nodes.items() if s == side)
        if indices:
            program = extract(bound.program, *indices)
            out[side] = OneSidedPart(indices, replace(bound, program=program))
    return out


def summarise(
    parts: dict[str, OneSidedPart], grid: TileGrid, num_levels: int, device: torch.device
) -> dict[int, Pyramid]:
    """A pyramid of num_levels levels for each node of `one_sided_parts`."""
    out: dict[int, Pyramid] = {}
    sizes = {"q": (grid.q_len, grid.q_block), "kv": (grid.kv_len, grid.kv_block)}
    for side, part in parts.items():
        length, block = sizes[side]
        chunks = [
            [_block_range(value, value, block) for value in values]
            for values in _evaluate(part.bound, side, grid, length, block, device)
        ]
        for place, index in enumerate(part.nodes):
            leaf = _join([chunk[place] for chunk in chunks])
            out[index] = Pyramid(side, _levels(leaf, num_levels))
    return out


def _evaluate(
    part: BoundProgram, side: str, grid: TileGrid, length: int, block: int, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Values [Bm, Hm, positions] of every output, over chunks of whole blocks."""
    b = torch.arange(grid.num_batches, device=device)[:, None, None]
    h = torch.arange(grid.num_heads, device=device)[None, :, None]
    axes = [part.program.axes[i] for i in part.program.outputs]
    # Lanes of a chunk are for the widest output.
    width = max(
        (grid.num_batches if a & Axes.B else 1) * (grid.num_heads if a & Axes.H else 1)
        for a in axes
    )
    chunk = max(1, _CHUNK_LANES // (width * block)) * block
    for begin in range(0, length, chunk):
        positions = torch.arange(begin, min(begin + chunk, length), device=device)
        inputs = {"b": b, "h": h, side: positions[None, None]}
        yield [
            value.reshape((1,) * (3 - value.dim()) + value.shape)
            for value in interpret(part, inputs)
        ]


def _join(ranges: list[Range]) -> Range:
    if ranges[0][0].shape[-1] == 1 and all(_equal(r, ranges[0]) for r in ranges[1:]):
        return ranges[0]  # does not depend on the position
    return torch.cat([lo for lo, _ in ranges], -1), torch.cat([hi for _, hi in ranges], -1)


def _equal(a: Range, b: Range) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def _levels(leaf: Range, num_levels: int) -> tuple[Range, ...]:
    levels = [leaf]
    for _ in range(num_levels - 1):
        levels.append(_block_range(*levels[-1], FANOUT))
    return tuple(levels)


def _block_range(lo: torch.Tensor, hi: torch.Tensor, block: int) -> Range:
    """Ranges over groups of `block` of the last dimension; the last group may be smaller."""
    size = lo.shape[-1]
    if size == 1:
        return lo, hi
    groups = -(-size // block)
    width = min(block, size)
    missing = groups * width - size
    pair = []
    for value, reduce in ((lo, torch.amin), (hi, torch.amax)):
        if missing:
            value = torch.cat([value, value[..., -1:].expand(*value.shape[:-1], missing)], -1)
        grouped = value.reshape(*value.shape[:-1], groups, width)
        if value.dtype is torch.bool:
            pair.append(grouped.all(-1) if reduce is torch.amin else grouped.any(-1))
        else:
            pair.append(reduce(grouped, -1))
    return pair[0], pair[1]
