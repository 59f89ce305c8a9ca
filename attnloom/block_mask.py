"""BlockMask: which tiles of the score matrix are empty, partial or full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Self

from attnloom.errors import OptionError, ShapeError, UnsupportedError
from attnloom.masking import display, portable, tokens, transforms, versions, views
from attnloom.masking import lists as block_lists
from attnloom.masking.arguments import check_mask_mod, read_int, read_lengths, shown
from attnloom.masking.constructors import KnownMasks
from attnloom.masking.decode import Decoding
from attnloom.masking.dynamo import outside_graph
from attnloom.masking.indexing import Index, choose
from attnloom.masking.lists import BlockLists, block_size_pair
from attnloom.masking.torch_layout import (
    DENSE_ATTRIBUTES,
    KvBlocks,
    TorchLayout,
    check_kv_blocks,
    dense_tiles,
    lists_from_kv_blocks,
    whole_tiles,
    write_order,
)
from attnloom.masking.transforms import outside_transforms
from attnloom.masking.views import MaskMod, noop_mask

__all__ = ["BlockLists", "BlockMask"]

_ORDER_TENSORS = ("dq_write_order", "dq_write_order_full", "dq_kv_order")


class BlockMask(KnownMasks, TorchLayout, Decoding):
    """A mask in tiles: which are empty, which are full, and a mask_mod for the rest.

    Drop-in for torch.nn.attention.flex_attention.BlockMask of torch 2.13. Stored are ragged lists
    (`lists()`); the dense tensors of torch's class are computed when first read. Beyond torch:
    lengths are in tokens and follow every slice; slices keep a right mask_mod; `rows`, `crop`,
    `to_mask`; constructors from dense masks, documents and key ranges; masks pickle with any
    mask_mod, and `.to` moves what the mask_mod captures.

    Attributes:
        seq_lengths: (Q_LEN, KV_LEN) in tokens.
        BLOCK_SIZE: (query, key) size of a tile in tokens.
        mask_mod: decides the scores of partial tiles. Takes positions of this mask: after
            mask[...], rows(...) it maps them to those of the mask it came from. May be replaced.
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, q_num_blocks, q_indices,
            full_q_num_blocks, full_q_indices: as torch's, int32; computed on demand.
        dq_write_order, dq_write_order_full, dq_kv_order, dq_kv_order_spt: kept for torch's FLASH
            backward; attnloom's kernels do not read them.
    """

    mask_mod: MaskMod

    @outside_transforms
    def __init__(  # noqa: PLR0913
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None,
        full_kv_indices: torch.Tensor | None,
        q_num_blocks: torch.Tensor | None,
        q_indices: torch.Tensor | None,
        full_q_num_blocks: torch.Tensor | None,
        full_q_indices: torch.Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (128, 128),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        """Take torch's dense tensors; see `from_kv_blocks`.

        Raises:
            ShapeError: they do not fit together or the lengths.
            OptionError: a block size is no power of two from 16.
        """
        if dq_write_order_full is not None and dq_write_order is None:
            raise OptionError("dq_write_order_full needs dq_write_order; give both or neither.")
        blocks = KvBlocks(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        self.BLOCK_SIZE = block_size_pair(BLOCK_SIZE)
        self._seq_lengths = read_lengths("seq_lengths", seq_lengths)
        check_kv_blocks(blocks, self._seq_lengths, self.BLOCK_SIZE)
        self._lists: BlockLists | None = None
        self._batch_dims = blocks.batch_dims
        self._has_full_lists = full_kv_num_blocks is not None
        self._has_q_blocks = q_num_blocks is not None
        given = {
            "kv_num_blocks": kv_num_blocks,
            "kv_indices": kv_indices,
            "full_kv_num_blocks": full_kv_num_blocks,
            "full_kv_indices": full_kv_indices,
        }
        if q_num_blocks is not None and q_indices is not None:
            given |= {"q_num_blocks": q_num_blocks, "q_indices": q_indices}
            if full_q_num_blocks is not None or not self._has_full_lists:
                given |= {
                    "full_q_num_blocks": full_q_num_blocks,
                    "full_q_indices": full_q_indices,
                }
        self._dense = given
        check_mask_mod(mask_mod)
        self.mask_mod = mask_mod
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    @classmethod
    def from_lists(
        cls,
        lists: BlockLists,
        mask_mod: MaskMod,
        batch_dims: tuple[int, ...] | None = None,
        separate_full_blocks: bool = True,
    ) -> Self:
        """A mask over ragged lists, which it shares.

        Args:
            lists: offsets must be 0; they belong into the mask_mod.
            batch_dims: leading dimensions the mask shows, at most (B, H); each is that of the lists
                or broadcasts from 1. Default: those of the lists.
            separate_full_blocks: False shows no full_kv_* tensors; all entries are then partial.
        """
        if lists.q_offset or lists.kv_offset:
            mask_mod = views.shift_mod(mask_mod, lists.q_offset, lists.kv_offset)
            lists = replace(lists, q_offset=0, kv_offset=0)
        mask = cls.__new__(cls)
        mask.BLOCK_SIZE = (lists.q_block, lists.kv_block)
        mask._seq_lengths = (lists.q_len, lists.kv_len)
        mask._lists = lists
        mask._dense = {}
        if batch_dims is None:
            batch_dims = (lists.num_batches, lists.num_heads)
        mask._batch_dims = batch_dims
        mask._has_full_lists = separate_full_blocks
        mask._has_q_blocks = True
        mask.mask_mod = mask_mod
        mask.dq_write_order = mask.dq_write_order_full = mask.dq_kv_order = None
        mask.dq_kv_order_spt = None
        return mask

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        full_kv_num_blocks: torch.Tensor | None = None,
        full_kv_indices: torch.Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: torch.Tensor | None = None,
        dq_write_order_full: torch.Tensor | None = None,
        dq_kv_order: torch.Tensor | bool | None = None,
    ) -> Self:
        """A mask of given block lists, as torch's method of that name.

        Args:
            kv_num_blocks, kv_indices: [..., rows] and [..., rows, width]: for each query block how
                many kv blocks are partial, and which; in any order. Leading dimensions: at most B
                and H.
            full_kv_num_blocks, full_kv_indices: the same of full blocks, where mask_mod is not
                asked.
            BLOCK_SIZE: one size or (query, key), powers of two from 16.
            mask_mod: for partial blocks; None keeps every score.
            seq_lengths: (Q_LEN, KV_LEN) in tokens; default (rows, width) times the block size.
            compute_q_blocks: False leaves q_* as None.
            dq_write_order, dq_write_order_full, dq_kv_order: kept as given.
        Raises:
            ShapeError: shapes do not fit together; later, when lists are first read: an index
                beyond KV_LEN, or a block listed twice.
            OptionError: BLOCK_SIZE or dq_kv_order means nothing.
        """
        pair = block_size_pair(BLOCK_SIZE)
        if dq_kv_order is not None and not isinstance(dq_kv_order, (bool, torch.Tensor)):
            raise OptionError(
                f"dq_kv_order is {shown(dq_kv_order)}; it must be a bool or a tensor."
            )
        mask = cls(
            whole_tiles(kv_indices, pair) if seq_lengths is None else seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            None,
            None,
            None,
            None,
            pair,
            noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, torch.Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        mask._has_q_blocks = compute_q_blocks
        return mask

    def lists(self) -> BlockLists:
        """The ragged lists that kernels read; computed once. Offsets are 0."""
        if self._lists is None:
            blocks = KvBlocks(
                self.kv_num_blocks,
                self.kv_indices,
                self.full_kv_num_blocks,
                self.full_kv_indices,
            )
            self._lists = lists_from_kv_blocks(blocks, self._seq_lengths, self.BLOCK_SIZE)
        if self._lists.chosen is self._lists_of_mod:
            self._lists = replace(self._lists, chosen=not self._lists_of_mod)
        if transforms.active():  # which wrap what they pass through a pytree
            self._lists = block_lists.plain(self._lists)
        return self._lists

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN); 1 broadcasts."""
        return (*self._batch_dims, *self._seq_lengths)

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN) in tokens. Assigning crops, and cannot grow: see `crop`."""
        return self._seq_lengths

    @seq_lengths.setter
    def seq_lengths(self, value: tuple[int, int]) -> None:
        smaller = self.crop(*read_lengths("seq_lengths", value))
        self._lists, self._dense = smaller._lists, smaller._dense
        self._seq_lengths = smaller._seq_lengths

    @property
    def device(self) -> torch.device:
        """Where the block lists lie."""
        if self._lists is not None:
            return self._lists.entries.device
        return self.kv_num_blocks.device

    @outside_graph
    @outside_transforms
    def __getitem__(self, index: Index | tuple[Index, ...]) -> Self:
        """Part of the mask: batch entries, heads and rows of tiles, as torch's indexing.

        mask[b], mask[b, h], mask[:, h], mask[:, :, rows]: an int keeps its dimension with size 1;
        slices and one-dimensional integer or bool tensors choose several. Lists, lengths and
        mask_mod are those of the part; rows count tiles (for tokens: `rows`).

        Raises:
            IndexError: out of range, or too many indices.
            ShapeError: a last row of tiles that overhangs Q_LEN is chosen before another one.
            UnsupportedError: the mask holds a tensor dq_kv_order.
        """
        part = choose(self._batch_dims, self.lists().grid, index, self.device)
        lists = part.lists(self.lists())
        return self._derive(lists, part.mod(self.mask_mod), part.batch_dims)

    @outside_graph
    @outside_transforms
    def rows(self, start: int, stop: int) -> Self:
        """The mask of queries start .. stop - 1 (tokens), for decoding or chunked prefill.

        Query 0 of the result is query `start` of this mask, for its mask_mod too. Where `start`
        is not a multiple of the block, a tile over two old ones is full only where both are, and
        partial where either is live: exact, with at most some needless partial tiles.

        Raises:
            ShapeError: not 0 <= start <= stop <= Q_LEN.
        """
        start, stop = read_int("start", start), read_int("stop", stop)
        if not 0 <= start <= stop <= self._seq_lengths[0]:
            raise ShapeError(
                f"rows({start}, {stop}) of a mask with Q_LEN {self._seq_lengths[0]}; 0 <= start <= "
                "stop <= Q_LEN must hold. Build the mask for the longest sequence you decode."
            )
        lists = block_lists.shift_rows(self.lists(), start, stop)
        return self._derive(lists, views.shift_mod(self.mask_mod, start), self._batch_dims)

    @outside_graph
    @outside_transforms
    def crop(self, q_len: int, kv_len: int) -> Self:
        """The mask of the first q_len queries and kv_len keys (tokens).

        Raises:
            ShapeError: a length is negative or beyond that of the mask.
        """
        q_len, kv_len = read_int("q_len", q_len), read_int("kv_len", kv_len)
        if not (0 <= q_len <= self._seq_lengths[0] and 0 <= kv_len <= self._seq_lengths[1]):
            raise ShapeError(
                f"crop({q_len}, {kv_len}) of a mask with Q_LEN {self._seq_lengths[0]} and KV_LEN "
                f"{self._seq_lengths[1]}; a mask does not grow. Build a longer one with "
                f"create_block_mask(mask_mod, B, H, {q_len}, {kv_len})."
            )
        lists = block_lists.crop(self.lists(), q_len, kv_len)
        return self._derive(lists, self.mask_mod, self._batch_dims)

    _adjust = crop  # torch's name

    def _derive(self, lists: BlockLists, mask_mod: MaskMod, batch_dims: tuple[int, ...]) -> Self:
        """A mask over lists made from this one's, with its options."""
        if self.dq_kv_order is not None:
            raise UnsupportedError(
                "this mask holds a tensor dq_kv_order, which has no part of its own. Build the "
                "smaller mask with from_kv_blocks and its own write order."
            )
        out = self.from_lists(lists, mask_mod, batch_dims, self._has_full_lists)
        out._has_q_blocks, out._lists_of_mod = self._has_q_blocks, self._lists_of_mod
        out._reading = versions.handed_on(self, out.mask_mod)
        out.dq_kv_order_spt = self.dq_kv_order_spt
        if self.dq_write_order is not None:
            out.compute_write_order(bool(self.dq_kv_order_spt))
        return out

    @outside_transforms
    def compute_write_order(self, descending: bool) -> None:
        """Fill dq_write_order and dq_write_order_full, as torch's create_block_mask does when
        compute_dq_write_order is set."""
        self.dq_kv_order_spt = descending
        for name, listed in (
            ("dq_write_order", self.q_indices),
            ("dq_write_order_full", self.full_q_indices),
        ):
            if listed is not None:
                order = write_order(self.lists(), listed, self._batch_dims, descending)
                setattr(self, name, order)

    def to(self, device: torch.device | str) -> Self:
        """The mask on another device: its lists, and the tensors that mask_mod captures (in cells,
        defaults, partials, callable objects, named globals; a nn.Module's owner moves it)."""
        return portable.move(self, device)

    def __reduce__(self) -> tuple[Any, ...]:
        return portable.reduce_mask(self)

    def numel(self) -> int:
        """Scores of the dense mask: the product of the shape."""
        return torch.Size(self.shape).numel()

    @outside_graph
    def sparsity(self) -> float:
        """Percent of the scores in tiles that are skipped. Tiles that overhang the lengths count
        with the part inside, so that it lies in 0 .. 100."""
        lists = self.lists()
        stored = lists.num_batches * lists.num_heads * lists.q_len * lists.kv_len
        return 100 * (1 - block_lists.live_area(lists) / stored) if stored else 0.0

    def to_dense(self) -> torch.Tensor:
        """[B, H, q_blocks, kv_blocks] int32: 1 where a tile is live. For tokens: `to_mask`."""
        return dense_tiles(self.lists(), self._batch_dims)

    @outside_graph
    def to_mask(self) -> torch.Tensor:
        """[B, H, Q_LEN, KV_LEN] bool: the scores that attention keeps; memory Q_LEN x KV_LEN.

        Raises:
            TraceError: mask_mod cannot be traced.
        """
        B, H = (1, 1, *self._batch_dims)[-2:]
        kept = tokens.mask_tokens(self.mask_mod, (B, H, *self._seq_lengths), self.device)
        return tokens.within_lists(kept.view(self.shape), self.lists(), self._batch_dims)

    @outside_graph
    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The mask in characters: full blocks are live, shaded cells are live in part.

        Args:
            grid_size: characters at most in rows and columns; -1 for one a tile.
            limit: batch entries and heads drawn.
        """
        return display.draw(self.lists(), self._batch_dims, grid_size, limit)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The attributes in the order of torch's method; flatten spreads both pairs of sizes."""
        lengths: tuple = self._seq_lengths if flatten else (self._seq_lengths,)
        sizes: tuple = self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)
        dense = (getattr(self, name) for name in DENSE_ATTRIBUTES)
        orders = (getattr(self, name) for name in _ORDER_TENSORS)
        return (*lengths, *dense, *orders, self.dq_kv_order_spt, *sizes, self.mask_mod)

    def __str__(self) -> str:
        picture = self.to_string().strip()
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{picture}\n)"

    def __repr__(self) -> str:
        return display.describe(self)


portable.register(BlockMask)
