"""Orders in which the tokens of a grid can lie in a sequence.

Neighbours of a grid should be neighbours of the sequence, so that whole tiles of the mask stay
empty. Row-major order keeps them together along the last axis only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnloom.mods.arguments import read_canvas, read_sizes


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The tokens of a canvas in some order.

    canvas: sizes of the grid, the slowest axis first.
    row_major: [S] int64, the row-major index of the token at each place of the sequence.
    place: [S] int64, the inverse: where each token of row-major order lies.
    """

    canvas: tuple[int, ...]
    row_major: Tensor
    place: Tensor

    def permute(self, x: Tensor, dim: int = -2) -> Tensor:
        """Tokens in row-major order along dim -> the same tokens in this order."""
        return x.index_select(dim, self.row_major)

    def restore(self, x: Tensor, dim: int = -2) -> Tensor:
        """The inverse of `permute`."""
        return x.index_select(dim, self.place)

    def coordinates(self) -> tuple[Tensor, ...]:
        """The position on each axis of the token at each place, each [S] int32."""
        return tuple(c.int() for c in axis_positions(self.row_major, self.canvas))


def tiled_order(canvas: Any, tile: Any, device: torch.device | str | None = None) -> TokenOrder:
    """Tile after tile, row-major among tiles and inside each.

    Args:
        canvas: sizes of the grid, 1 to 3 axes, the slowest first.
        tile: sizes of a tile, or one for every axis, 1 or more. Tiles at the end of an axis that
            they do not divide are smaller.
        device: of the tables; default: torch's.
    Returns:
        TokenOrder. Tiles whose volume is the BLOCK_SIZE of the mask, and that divide the canvas,
        make each tile of tokens one block.
    Raises:
        ModError: a size is less than 1, or not one an axis.
    Source: Dong et al. 2024, arXiv:2412.05496, appendix A.1 (tiled neighbourhood attention).
    """
    sizes = read_canvas("tiled_order", canvas)
    sides = read_sizes("tiled_order", "tile", tile, len(sizes))
    places = axis_positions(torch.arange(_volume(sizes), device=device), sizes)
    key = torch.zeros_like(places[0])
    for place, side, size in zip(places, sides, sizes, strict=True):
        key = key * -(-size // side) + place // side
    for place, side in zip(places, sides, strict=True):
        key = key * side + place % side
    return _ordered_by(key, sizes)


def morton_order(canvas: Any, device: torch.device | str | None = None) -> TokenOrder:
    """Along the Morton curve (Z-order): by the interleaved bits of the coordinates.

    Args:
        canvas: sizes of the grid, 1 to 3 axes, the slowest first; any sizes, powers of two fill the
            curve without gaps.
        device: of the tables; default: torch's.
    Returns:
        TokenOrder. Every aligned run of 2^(n * axes) tokens of such a canvas is a cube of side 2^n.
    Raises:
        ModError: a size is less than 1.
    Source: Morton 1966; for attention Dong et al. 2024, arXiv:2412.05496, appendix A.1.
    """
    sizes = read_canvas("morton_order", canvas)
    places = axis_positions(torch.arange(_volume(sizes), device=device), sizes)
    key = torch.zeros_like(places[0])
    for bit in range(max(sizes).bit_length()):
        for axis, place in enumerate(places):
            key |= ((place >> bit) & 1) << (bit * len(sizes) + len(sizes) - 1 - axis)
    return _ordered_by(key, sizes)


def axis_positions(index: Tensor, canvas: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Positions on each axis of row-major indices; of traced ones too."""
    found, stride = [], 1
    for axis in reversed(range(len(canvas))):
        along = index // stride if stride > 1 else index
        found.insert(0, along % canvas[axis] if axis else along)
        stride *= canvas[axis]
    return tuple(found)


def _volume(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()


def _ordered_by(key: Tensor, canvas: tuple[int, ...]) -> TokenOrder:
    row_major = key.argsort()
    place = torch.empty_like(row_major)
    place[row_major] = torch.arange(row_major.numel(), device=key.device)
    return TokenOrder(canvas, row_major, place)
