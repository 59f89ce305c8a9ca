"""The data behind pictures of masks: what each token or tile of a region is, and its colour.

Cells are shrunk by averaging their colours, so that a picture of any length has a bounded number of
pixels and a fine pattern becomes an even tint instead of stripes that are not there.
"""

from __future__ import annotations

import enum
import functools

import numpy as np
import torch

from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError
from attnloom.masking.captures import captured_tensors
from attnloom.masking.tokens import mask_tokens
from attnloom.masking.views import MaskMod
from attnloom.plots.colours import palette_rgb
from attnloom.plots.region import Region, Span, check_inside

MAX_SCORES = 1 << 24
MAX_CELLS = 1024


class Kind(enum.IntEnum):
    """What a cell is; tiles are EMPTY, PARTIAL or FULL.

    DROPPED: masked in a partial tile, so computed and thrown away. PARTIAL: kept in a partial tile.
    FULL: kept in a full tile, or kept where no tiles are known. EMPTY: never computed.
    """

    EMPTY = 0
    DROPPED = 1
    PARTIAL = 2
    FULL = 3


def token_kinds(
    mask_mod: MaskMod, block_mask: BlockMask | None, region: Region, head: int
) -> np.ndarray:
    """[queries, keys] uint8 of Kind for the tokens of a region.

    Raises:
        ShapeError: the region has more than MAX_SCORES scores. TraceError: mask_mod has no trace.
    """
    rows, columns = region.shape
    if rows * columns > MAX_SCORES:
        raise ShapeError(
            f"a picture of {rows} x {columns} tokens asks for {rows * columns} scores of the mask, "
            f"more than {MAX_SCORES}. Zoom in with q_range=(first, end) and kv_range=(first, end), "
            "or draw tiles with plot_block_map, which takes any length."
        )
    offsets = (region.batch, head, region.q[0], region.kv[0])
    device = torch.device("cpu") if block_mask is None else block_mask.device
    there = functools.partial(seen_from, mask_mod, offsets)
    kept = mask_tokens(there, (1, 1, rows, columns), device_of(mask_mod, device))[0, 0]
    kept = kept.cpu().numpy()
    if block_mask is None:
        return np.where(kept, Kind.FULL, Kind.EMPTY).astype(np.uint8)
    tiles = tile_kinds(block_mask, region, head)
    q_block, kv_block = block_mask.BLOCK_SIZE
    at_row = np.arange(*region.q) // q_block - region.q[0] // q_block
    at_column = np.arange(*region.kv) // kv_block - region.kv[0] // kv_block
    of_tile = tiles[at_row[:, None], at_column]
    dropped = (of_tile == Kind.PARTIAL) & ~kept
    return np.where(dropped, Kind.DROPPED, of_tile).astype(np.uint8)


def tile_kinds(block_mask: BlockMask, region: Region, head: int) -> np.ndarray:
    """[rows, columns] uint8 of Kind for the tiles that a region touches."""
    (top, bottom), (left, right) = tile_spans(block_mask, region)
    kinds = np.zeros((bottom - top, right - left), dtype=np.uint8)
    rows, columns, partial = live_tiles(block_mask, region, head)
    kinds[rows, columns] = np.where(partial, Kind.PARTIAL, Kind.FULL)
    return kinds


def tile_colours(block_mask: BlockMask, region: Region, head: int) -> np.ndarray:
    """[rows, columns, 3] float64 of the tiles that a region touches, at most MAX_CELLS a side."""
    (top, bottom), (left, right) = tile_spans(block_mask, region)
    size = (bottom - top, right - left)
    steps = tuple(-(-n // MAX_CELLS) for n in size)
    cells = tuple(-(-n // step) for n, step in zip(size, steps, strict=True))
    rows, columns, partial = live_tiles(block_mask, region, head)
    at = rows // steps[0] * cells[1] + columns // steps[1]
    area = np.multiply.outer(*(run_lengths(n, step) for n, step in zip(size, steps, strict=True)))
    shares = np.zeros((4, *cells))
    for kind, chosen in ((Kind.PARTIAL, partial), (Kind.FULL, ~partial)):
        counts = np.bincount(at[chosen], minlength=cells[0] * cells[1]).reshape(cells)
        shares[kind] = counts / area
    shares[Kind.EMPTY] = 1 - shares[Kind.PARTIAL] - shares[Kind.FULL]
    return np.einsum("kij,kc->ijc", shares, palette_rgb())


def tile_spans(block_mask: BlockMask, region: Region) -> tuple[Span, Span]:
    """Rows and columns of tiles that a region touches, each as (first, end)."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    rows = (region.q[0] // q_block, -(-region.q[1] // q_block))
    return rows, (region.kv[0] // kv_block, -(-region.kv[1] // kv_block))


def colours_of(kinds: np.ndarray) -> np.ndarray:
    """[rows, columns, 3] float64 of Kinds, averaged down to at most MAX_CELLS a side."""
    image = palette_rgb()[kinds]
    for axis in (0, 1):
        step = -(-image.shape[axis] // MAX_CELLS)
        if step > 1:
            starts = np.arange(0, image.shape[axis], step)
            shape = [1, 1, 1]
            shape[axis] = -1
            widths = run_lengths(image.shape[axis], step).reshape(shape)
            image = np.add.reduceat(image, starts, axis=axis) / widths
    return image


def live_tiles(
    block_mask: BlockMask, region: Region, head: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and partial flag of each live tile that a region touches, from its corner."""
    lists = block_mask.lists()
    batch = check_inside("batch", region.batch, lists.num_batches)
    entry = batch * lists.num_heads + check_inside("head", head, lists.num_heads)
    (top, bottom), (left, right) = tile_spans(block_mask, region)
    base = entry * lists.grid.num_q_blocks
    offsets = lists.row_offsets[base + top : base + bottom + 1].cpu().numpy()
    entries = lists.entries[offsets[0] : offsets[-1]].cpu().numpy()
    rows = np.repeat(np.arange(bottom - top), np.diff(offsets))
    columns = entries >> 1
    inside = (columns >= left) & (columns < right)
    return rows[inside], columns[inside] - left, (entries[inside] & 1).astype(bool)


def run_lengths(size: int, step: int) -> np.ndarray:
    """How many of `size` things fall into each run of `step`."""
    starts = np.arange(0, size, step)
    return np.minimum(step, size - starts)


def device_of(mask_mod: MaskMod, default: torch.device) -> torch.device:
    """Where what a mask_mod captures lies."""
    return next((t.device for t in captured_tensors(mask_mod)), default)


def seen_from(
    mask_mod: MaskMod,
    offsets: tuple[int, int, int, int],
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
) -> torch.Tensor:
    """The mask seen from a batch entry, a head and a corner of a region."""
    batch, head, q, kv = offsets
    return mask_mod(b + batch, h + head, q_idx + q, kv_idx + kv)
