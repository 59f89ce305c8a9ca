"""Sliding tile attention: a window that moves by whole tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnloom.masking.extent import limited
from attnloom.masking.views import MaskMod
from attnloom.mods.arguments import axis_name, read_canvas, read_odd, read_sizes
from attnloom.mods.extent import of_canvas
from attnloom.mods.neighborhood import positions_in
from attnloom.mods.token_order import TokenOrder, tiled_order


def sliding_tile(canvas: Any, tile: Any, window: Any, order: TokenOrder | None = None) -> MaskMod:
    """All tokens of a tile see the same window of tiles, which is moved inside at the borders.

    On each axis, in units of tiles, for a query's tile i and a key's tile j among n:

        centre = clamp(i, window // 2, n - 1 - window // 2);  |centre - j| <= window // 2

    Args:
        canvas: sizes of the grid, 1 to 3 axes, the slowest first: (T, H, W) for video.
        tile: tokens of a tile along each axis, or one for every axis. Last tiles of an axis that
            they do not divide are smaller.
        window: tiles that a query sees along each axis, odd; cut to all where there are fewer.
        order: how tokens lie in the sequence; default: tiled_order(canvas, tile) on torch's default
            device, which makes every block of the mask full or empty where BLOCK_SIZE is the volume
            of a tile. For another device give the order with its tables there.
    Returns:
        mask_mod capturing the tile of each token, a table an axis.
    Raises:
        ModError: a size is too small, even, or not one an axis; order is of another canvas.
    Source: Zhang et al. 2025, arXiv:2502.04507.
    """
    name = "sliding_tile"
    sizes = read_canvas(name, canvas)
    sides = read_sizes(name, "tile", tile, len(sizes))
    windows = read_sizes(name, "window", window, len(sizes))
    counts = [-(-size // side) for size, side in zip(sizes, sides, strict=True)]
    reach = [
        read_odd(name, axis_name("window", window, axis), w) // 2 for axis, w in enumerate(windows)
    ]
    positions = positions_in(name, sizes, order or tiled_order(sizes, sides))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kept = None
        places = zip(positions(q_idx), positions(kv_idx), sides, counts, reach, strict=True)
        for q, kv, side, count, r in places:
            if 2 * r + 1 >= count:
                continue
            near = ((q // side).clamp(r, count - 1 - r) - kv // side).abs() <= r
            kept = near if kept is None else kept & near
        return kept if kept is not None else q_idx >= 0

    return limited(mask_mod, *of_canvas(name, sizes))
