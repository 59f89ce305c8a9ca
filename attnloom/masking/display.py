"""A picture of a mask in characters, from its lists: cost follows the live tiles shown."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from attnloom.errors import OptionError
from attnloom.masking.arguments import shown
from attnloom.masking.lists import BlockLists
from attnloom.trace.names import mod_name

_EMPTY, _MIXED, _LIVE = " ", "░", "█"


def describe(mask: Any) -> str:
    """The numbers of a BlockMask."""
    lists = mask.lists()
    partial = int((lists.entries & 1).sum())
    return (
        "BlockMask(\n"
        f"    shape={mask.shape},\n"
        f"    BLOCK_SIZE={mask.BLOCK_SIZE},\n"
        f"    stored={lists.num_batches} x {lists.num_heads} lists,\n"
        f"    partial={partial}, full={lists.entries.numel() - partial},\n"
        f"    sparsity={mask.sparsity():.2f}%,\n"
        f"    device={mask.device},\n"
        f"    mask_mod={mod_name(mask.mask_mod)}\n"
        ")"
    )


def draw(
    lists: BlockLists,
    batch_dims: tuple[int, ...],
    grid_size: int | tuple[int, int],
    limit: int,
) -> str:
    """At most `limit` pictures, one for each batch entry and head.

    grid_size: rows and columns of characters at most; -1 draws every tile.
    """
    sizes = grid_size if isinstance(grid_size, (tuple, list)) else (grid_size, grid_size)
    if len(sizes) != 2 or not all(isinstance(n, int) and n for n in (*sizes, limit)):
        raise OptionError(
            f"grid_size is {shown(grid_size)} and limit {shown(limit)}; they must be one int or a "
            "pair (rows, columns), -1 for one character a tile, and an int above 0."
        )
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
    width = -(-columns // column_step)
    widths = [min(column_step, columns - c * column_step) for c in range(width)]
    offsets = lists.row_offsets[entry * rows : (entry + 1) * rows + 1].tolist()
    lines = []
    for top in range(0, rows, row_step):
        bottom = min(top + row_step, rows)
        # The entries of neighbouring rows lie side by side.
        column = lists.entries[offsets[top] : offsets[bottom]] >> 1
        live = torch.bincount(column // column_step, minlength=width).tolist()
        lines.append(
            "".join(_symbol(n, (bottom - top) * w) * 2 for n, w in zip(live, widths, strict=True))
        )
    return "".join(line + "\n" for line in lines)


def _symbol(live: int, size: int) -> str:
    return _EMPTY if live == 0 else _LIVE if live == size else _MIXED
