"""What a mask can be over rectangles of scores, by interval arithmetic.

Known exactly, and given to `bounds`, are one-sided parts (from pyramids, or at single positions)
and elements of captured tensors of whose indices all but one are single values over the rectangle,
such as `table[q_idx // 128, kv_idx // 128]` on a tile, or `near[h, q_idx - kv_idx]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnloom.ir.node import BoundProgram, DType
from attnloom.ir.passes.bounds import bounds, node_intervals
from attnloom.masking.lists import TileGrid
from attnloom.masking.summaries import FANOUT, Range, one_sided_parts, summarise
from attnloom.masking.table_ranges import SparseTable, element_range


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Rectangles of FANOUT ** level tiles a side. b, h, row, column: [n] int64."""

    level: int
    b: torch.Tensor
    h: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    def __len__(self) -> int:
        return self.b.numel()

    def __getitem__(self, index: slice | torch.Tensor) -> Rectangles:
        return Rectangles(
            self.level, self.b[index], self.h[index], self.row[index], self.column[index]
        )

    def split(self, size: int) -> list[Rectangles]:
        return [self[i : i + size] for i in range(0, len(self), size)]

    @staticmethod
    def join(parts: list[Rectangles]) -> Rectangles:
        return Rectangles(
            parts[0].level,
            torch.cat([p.b for p in parts]),
            torch.cat([p.h for p in parts]),
            torch.cat([p.row for p in parts]),
            torch.cat([p.column for p in parts]),
        )


class Ranges:
    """Ranges of one mask program. num_levels: of rectangles, see Rectangles.level."""

    def __init__(
        self, bound: BoundProgram, grid: TileGrid, num_levels: int, device: torch.device
    ) -> None:
        self.bound = bound
        self.grid = grid
        self.device = device
        self.parts = one_sided_parts(bound)
        self.pyramids = summarise(self.parts, grid, num_levels, device)
        self.joint_loads = _joint_loads(bound, set(self.pyramids))
        self.whole = {i: _whole_range(bound, i) for i in self.joint_loads}
        self.tables: dict[int, dict[int, SparseTable]] = {i: {} for i in self.joint_loads}

    @property
    def are_exact(self) -> bool:
        """Whether an undecided tile is surely mixed: the mask itself depends on one side."""
        return self.bound.program.outputs[0] in self.pyramids

    def spans(self, rectangles: Rectangles) -> dict[str, Range]:
        """First and last position of each input over each rectangle, [n]."""
        grid, scale = self.grid, FANOUT**rectangles.level
        height, width = grid.q_block * scale, grid.kv_block * scale
        q, kv = rectangles.row * height, rectangles.column * width
        return {
            "b": (rectangles.b, rectangles.b),
            "h": (rectangles.h, rectangles.h),
            "q": (q, (q + (height - 1)).clamp(max=grid.q_len - 1)),
            "kv": (kv, (kv + (width - 1)).clamp(max=grid.kv_len - 1)),
        }

    def over(self, rectangles: Rectangles) -> Range:
        """(all scores surely kept, some score possibly kept), each [n] bool."""
        known = self._summaries(rectangles, ("q", "kv"))
        lo, hi = self._bounds(self.spans(rectangles), known)
        return lo.expand(len(rectangles)), hi.expand(len(rectangles))

    def over_strips(self, tiles: Rectangles, side: str, positions: torch.Tensor) -> Range:
        """As `over`, for strips of tiles one position wide.

        side: "q" for rows, "kv" for columns; positions: [n, strips] of it. Returns [n, strips].
        """
        other = "kv" if side == "q" else "q"
        spans = {name: (lo[:, None], hi[:, None]) for name, (lo, hi) in self.spans(tiles).items()}
        spans[side] = (positions, positions)
        known = {
            index: (lo[:, None], hi[:, None])
            for index, (lo, hi) in self._summaries(tiles, (other,)).items()
        }
        if side in self.parts:
            b, h = tiles.b[:, None], tiles.h[:, None]
            for index, value in self.parts[side].at(side, b, h, positions).items():
                known[index] = (value, value)
        lo, hi = self._bounds(spans, known)
        return lo.expand(positions.shape), hi.expand(positions.shape)

    def _summaries(self, rectangles: Rectangles, sides: tuple[str, ...]) -> dict[int, Range]:
        blocks = {"q": rectangles.row, "kv": rectangles.column}
        return {
            index: pyramid.at(rectangles.level, rectangles.b, rectangles.h, blocks[pyramid.side])
            for index, pyramid in self.pyramids.items()
            if pyramid.side in sides
        }

    def _bounds(self, spans: dict[str, Range], known: dict[int, Range]) -> Range:
        for index in self.joint_loads:
            node = self.bound.program.nodes[index]
            found = node_intervals(self.bound, spans, known, node.args)
            known[index] = element_range(
                self.bound.tensors[node.attr],  # type: ignore[index]
                node.dtype,
                [found[a] for a in node.args],
                self.whole[index],
                self.tables[index],
            )
        return bounds(self.bound, spans, known)


def _joint_loads(bound: BoundProgram, known: set[int]) -> list[int]:
    """Loads that depend on both sides, in order; those inside reductions are left out."""
    program = bound.program
    needed: set[int] = set()
    pending = list(program.outputs)
    while pending:
        index = pending.pop()
        if index not in needed and index not in known:
            needed.add(index)
            pending += program.nodes[index].args
    return [
        i for i in sorted(needed) if program.nodes[i].op == "load" and program.axes[i] & ~15 == 0
    ]


def _whole_range(bound: BoundProgram, index: int) -> Range:
    """Smallest and largest element of the tensor that a load reads: bool, int64 or float64."""
    node = bound.program.nodes[index]
    tensor = bound.tensors[node.attr].detach()  # type: ignore[index]
    if not tensor.numel():
        tensor = tensor.new_zeros(1)
    if node.dtype is DType.BOOL:
        return tensor.all(), tensor.any()
    lo, hi = torch.aminmax(tensor)
    wide = torch.float64 if node.dtype.is_float else torch.int64
    return lo.to(wide), hi.to(wide)
