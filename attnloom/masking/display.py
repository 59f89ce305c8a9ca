"""A picture of a mask in characters, from its lists: cost follows the live tiles shown."""

from __future__ import annotations

import itertools

import torch

from attnloom.masking.lists import BlockLists

_EMPTY, _MIXED, _LIVE = " ", "░", "█"


def draw(
    lists: BlockLists,
    batch_dims: tuple[int, ...],
    grid_size: int | tuple[int, int],
    limit: int,
) -> str:
    """At most `limit` pictures, one for each batch entry and head.

    grid_size: rows and columns of characters at most; -1 draws every tile.
    """
    pictures = []
    for count, index in enumerate(itertools.product(*map(range, batch_dims))):
        if count == limit:
            pictures += [
                "...",
                "To print out more, set BlockMask.to_string(limit=N)",
                "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
            ]
            break
        b, h = (0, 0, *index)[-2:]
        entry = min(b, lists.num_batches - 1) * lists.num_heads + min(h, lists.num_heads - 1)
        pictures.append(f"{index}\n" + _draw_one(lists, entry, grid_size))
    return "\n".join(pictures)


def _draw_one(lists: BlockLists, entry: int, grid_size: int | tuple[int, int]) -> str:
    grid = lists.grid
    rows, columns = grid.num_q_blocks, grid.num_kv_blocks
    limits = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    row_step, column_step = (
        1 if most < 0 else max(1, -(-size // most))
        for size, most in zip((rows, columns), limits, strict=True)
    )
    height, width = -(-rows // row_step), -(-columns // column_step)
    offsets = lists.row_offsets[entry * rows : (entry + 1) * rows + 1]
    row = torch.repeat_interleave(torch.arange(rows, device=offsets.device), offsets.diff())
    column = lists.entries[int(offsets[0]) : int(offsets[-1])] >> 1
    cell = row // row_step * width + column // column_step
    live = torch.bincount(cell, minlength=height * width).view(height, width).tolist()
    sizes = [
        [
            min(row_step, rows - r * row_step) * min(column_step, columns - c * column_step)
            for c in range(width)
        ]
        for r in range(height)
    ]
    lines = (
        "".join(_symbol(n, of) * 2 for n, of in zip(counts, areas, strict=True))
        for counts, areas in zip(live, sizes, strict=True)
    )
    return "".join(line + "\n" for line in lines)


def _symbol(live: int, size: int) -> str:
    return _EMPTY if live == 0 else _LIVE if live == size else _MIXED
