"""The dense tensors of torch's BlockMask, made from ragged lists when asked for, and read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnloom.errors import DtypeError, ShapeError, counted
from attnloom.masking.arguments import check_tensor
from attnloom.masking.dynamo import outside_graph
from attnloom.masking.lists import (
    BlockLists,
    TileGrid,
    lists_from_keys,
    of_kind,
    transpose,
)
from attnloom.masking.transforms import outside_transforms

# Attributes of torch's BlockMask -> (which tiles, "num" or "indices", listed by row or column).
DENSE_ATTRIBUTES = {
    "kv_num_blocks": ("partial", "num", "row"),
    "kv_indices": ("partial", "indices", "row"),
    "full_kv_num_blocks": ("full", "num", "row"),
    "full_kv_indices": ("full", "indices", "row"),
    "q_num_blocks": ("partial", "num", "column"),
    "q_indices": ("partial", "indices", "column"),
    "full_q_num_blocks": ("full", "num", "column"),
    "full_q_indices": ("full", "indices", "column"),
}


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Block lists as torch writes them; only the first `num` indices of a row are read.

    num [..., rows] and indices [..., rows, width] int32 of partial tiles; the same of full tiles,
    both or neither.
    """

    num: torch.Tensor
    indices: torch.Tensor
    full_num: torch.Tensor | None
    full_indices: torch.Tensor | None

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """(num, indices, 1 if partial) of each kind present."""
        out = [(self.num, self.indices, 1)]
        if self.full_num is not None and self.full_indices is not None:
            out.append((self.full_num, self.full_indices, 0))
        return out

    @property
    def batch_dims(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(*(num.shape[:-1] for num, _, _ in self.pairs)))


def whole_tiles(kv_indices: torch.Tensor, block_size: tuple[int, int]) -> tuple[int, int]:
    """Lengths of a mask of whole tiles, from [..., rows, width]."""
    check_tensor("kv_indices", kv_indices)
    rows, width = kv_indices.shape[-2:] if kv_indices.dim() >= 2 else (0, 0)
    return rows * block_size[0], width * block_size[1]


def check_kv_blocks(
    blocks: KvBlocks, seq_lengths: tuple[int, int], block_size: tuple[int, int]
) -> None:
    """Raises ShapeError where shapes do not fit together, DtypeError where a list holds no
    integers; reads no data."""
    if (blocks.full_num is None) != (blocks.full_indices is None):
        raise ShapeError(
            "full_kv_num_blocks and full_kv_indices describe full tiles together; give both or "
            "neither."
        )
    rows = -(-seq_lengths[0] // block_size[0])
    for num, indices, partial in blocks.pairs:
        prefix = "" if partial else "full_"
        for name, tensor in (("kv_num_blocks", num), ("kv_indices", indices)):
            check_tensor(prefix + name, tensor)
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                raise DtypeError(
                    f"{prefix}{name} is {tensor.dtype}; block lists hold integers. Use .int()."
                )
        if indices.dim() < 2 or indices.dim() > 4 or num.shape != indices.shape[:-1]:
            raise ShapeError(
                f"{prefix}kv_num_blocks is {list(num.shape)} and {prefix}kv_indices "
                f"{list(indices.shape)}; they must be [B, H, rows] and [B, H, rows, width], where "
                "B and H may be left out."
            )
        if num.shape[-1] != rows:
            raise ShapeError(
                f"{prefix}kv_num_blocks has {counted(num.shape[-1], 'row')} of blocks, but Q_LEN "
                f"{seq_lengths[0]} at block size {block_size[0]} makes {rows}. Pass seq_lengths="
                "(Q_LEN, KV_LEN) that fit the lists."
            )


@outside_graph
@outside_transforms
def lists_from_kv_blocks(
    blocks: KvBlocks, seq_lengths: tuple[int, int], block_size: tuple[int, int]
) -> BlockLists:
    """Sorted ragged lists. Batch dimensions that are expanded (stride 0) are stored once.

    Raises:
        ShapeError: an index lies beyond KV_LEN, or a tile is listed twice.
    """
    dims = (1, 1, *blocks.batch_dims)[-2:]
    stored = tuple(
        _stored_size(blocks, dim, size) for dim, size in zip((-2, -1), dims, strict=True)
    )
    grid = TileGrid(stored[0], stored[1], *seq_lengths, *block_size)
    rows, entries = [], []
    for num, indices, partial in blocks.pairs:
        shape = (*dims, num.shape[-1], indices.shape[-1])
        wide = indices.expand(shape)[: stored[0], : stored[1]]
        counts = num.expand(shape[:-1])[: stored[0], : stored[1]]
        listed = torch.arange(shape[-1], device=num.device) < counts[..., None]
        columns = wide[listed].to(torch.int64)
        beyond = (columns < 0) | (columns >= grid.num_kv_blocks)
        if bool(beyond.any()):
            raise ShapeError(
                f"kv_indices lists block {int(columns[beyond][0])}, but KV_LEN {grid.kv_len} at "
                f"block size {grid.kv_block} has {counted(grid.num_kv_blocks, 'block')}. Pass "
                "seq_lengths=(Q_LEN, KV_LEN) that cover every listed block."
            )
        flat_rows = torch.arange(grid.num_rows, device=num.device).view(listed.shape[:-1])
        rows.append(flat_rows[..., None].expand(listed.shape)[listed])
        entries.append(columns * 2 + partial)
    return lists_from_keys(grid, torch.cat(rows), torch.cat(entries))


def _stored_size(blocks: KvBlocks, dim: int, size: int) -> int:
    for num, indices, _ in blocks.pairs:
        for tensor, axis in ((num, dim - 1), (indices, dim - 2)):
            if -axis <= tensor.dim() and tensor.shape[axis] > 1 and tensor.stride(axis):
                return size
    return min(size, 1)


def dense_pair(
    lists: BlockLists, kind: str, side: str, batch_dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's (num, indices) of partial, full or all live tiles, by row or by column.

    Returns:
        num [*batch_dims, lines] and indices [*batch_dims, lines, width], int32, contiguous over
        their last dimensions and expanded where the mask is stored once. Indices after the first
        `num` of a line are 0.
    """
    grid = lists.grid
    if side == "column":
        offsets, values = transpose(lists, kind)
        lines, width = grid.num_kv_blocks, grid.num_q_blocks
        line_of = torch.repeat_interleave(
            torch.arange(offsets.numel() - 1, device=offsets.device),
            offsets.diff(),
            output_size=values.numel(),
        )
        counts = offsets.diff()
        begins = offsets[:-1]
    else:
        chosen = of_kind(lists, kind)
        lines, width = grid.num_q_blocks, grid.num_kv_blocks
        line_of = lists.entry_rows()[chosen]
        values = lists.entries[chosen] >> 1
        counts = torch.bincount(line_of, minlength=grid.num_rows)
        begins = counts.cumsum(0) - counts
    stored = (lists.num_batches, lists.num_heads)
    indices = torch.zeros(counts.numel(), width, dtype=torch.int32, device=values.device)
    place = torch.arange(values.numel(), device=values.device) - begins[line_of]
    indices[line_of, place] = values
    num = counts.to(torch.int32).view(*stored, lines)
    return (
        expand_batch(num, batch_dims, 1),
        expand_batch(indices.view(*stored, lines, width), batch_dims, 2),
    )


def dense_tiles(lists: BlockLists, batch_dims: tuple[int, ...]) -> torch.Tensor:
    """[*batch_dims, q_blocks, kv_blocks] int32: 1 where a tile is live."""
    grid = lists.grid
    tiles = torch.zeros(
        grid.num_rows, grid.num_kv_blocks, dtype=torch.int32, device=lists.entries.device
    )
    tiles[lists.entry_rows(), (lists.entries >> 1).to(torch.int64)] = 1
    stored = (lists.num_batches, lists.num_heads, grid.num_q_blocks, grid.num_kv_blocks)
    return expand_batch(tiles.view(stored), batch_dims, 2)


def expand_batch(tensor: torch.Tensor, batch_dims: tuple[int, ...], trailing: int) -> torch.Tensor:
    """[Bm, Hm, ...] -> [*batch_dims, ...]."""
    for _ in range(2 - len(batch_dims)):
        tensor = tensor[0]
    return tensor.expand(*batch_dims, *tensor.shape[tensor.dim() - trailing :])


def write_order(
    lists: BlockLists, q_indices: torch.Tensor, batch_dims: tuple[int, ...], descending: bool
) -> torch.Tensor:
    """torch's dq_write_order: for each listed (kv block, query block), the rank of the kv block
    among the live kv blocks of that query block, in ascending or descending order.

    q_indices: [*batch_dims, kv_blocks, q_blocks]. Returns the same shape, int32.
    """
    live = dense_tiles(lists, batch_dims)
    ranks = live.cumsum(-1) - live
    if descending:
        ranks = live.sum(-1, keepdim=True) - 1 - ranks
    # ranks [..., q, kv] -> by column [..., kv, q], then the query blocks in listed order.
    return ranks.transpose(-1, -2).gather(-1, q_indices.to(torch.int64)).to(torch.int32)


class TorchLayout:
    """torch's dense attributes as properties, computed once when first read."""

    _dense: dict[str, torch.Tensor | None]
    _batch_dims: tuple[int, ...]
    _has_full_lists: bool
    _has_q_blocks: bool

    def lists(self) -> BlockLists:
        raise NotImplementedError

    @outside_transforms
    def _dense_attribute(self, name: str) -> Any:
        if name in self._dense:
            return self._dense[name]
        kind, _, side = DENSE_ATTRIBUTES[name]
        prefix = ("full_" if kind == "full" else "") + ("kv_" if side == "row" else "q_")
        absent = (kind == "full" and not self._has_full_lists) or (
            side == "column" and not self._has_q_blocks
        )
        pair = (None, None)
        if not absent:
            pair = dense_pair(self.lists(), kind, side, self._batch_dims)
        self._dense[prefix + "num_blocks"], self._dense[prefix + "indices"] = pair
        return self._dense[name]

    @property
    def kv_num_blocks(self) -> torch.Tensor:
        """[B, H, q_blocks] int32: partial tiles of each query block."""
        return self._dense_attribute("kv_num_blocks")

    @property
    def kv_indices(self) -> torch.Tensor:
        """[B, H, q_blocks, kv_blocks] int32: their kv blocks, ascending."""
        return self._dense_attribute("kv_indices")

    @property
    def full_kv_num_blocks(self) -> torch.Tensor | None:
        """[B, H, q_blocks] int32: full tiles of each query block."""
        return self._dense_attribute("full_kv_num_blocks")

    @property
    def full_kv_indices(self) -> torch.Tensor | None:
        """[B, H, q_blocks, kv_blocks] int32: their kv blocks, ascending."""
        return self._dense_attribute("full_kv_indices")

    @property
    def q_num_blocks(self) -> torch.Tensor | None:
        """[B, H, kv_blocks] int32: partial tiles of each kv block."""
        return self._dense_attribute("q_num_blocks")

    @property
    def q_indices(self) -> torch.Tensor | None:
        """[B, H, kv_blocks, q_blocks] int32: their query blocks, ascending."""
        return self._dense_attribute("q_indices")

    @property
    def full_q_num_blocks(self) -> torch.Tensor | None:
        """[B, H, kv_blocks] int32: full tiles of each kv block."""
        return self._dense_attribute("full_q_num_blocks")

    @property
    def full_q_indices(self) -> torch.Tensor | None:
        """[B, H, kv_blocks, q_blocks] int32: their query blocks, ascending."""
        return self._dense_attribute("full_q_indices")
