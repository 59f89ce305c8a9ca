"""The names of torch.nn.attention.experimental._paged_attention, on attnloom's masks and pages.

For programs written for torch's PagedAttention, which turns the page table into a mask of physical
positions. New programs want `attnloom.PagedKVCache`, where kernels read the table; `kv` leads
there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from attnloom import errors
from attnloom.block_mask import BlockMask
from attnloom.errors import DeviceError
from attnloom.masking.lists import TileGrid, lists_from_keys
from attnloom.masking.views import noop_mask
from attnloom.paged import PageAllocator, PagedKV, PageTable
from attnloom.paged.table import check_page_size

Mod = Callable[..., torch.Tensor]


class OutOfPagesError(errors.OutOfPagesError, AssertionError):
    """As torch's class asserts that there are enough, and programs catch that."""


class ShapeError(errors.ShapeError, RuntimeError):
    """As torch's class refuses sizes."""


class OptionError(errors.OptionError, RuntimeError):
    """As torch's class refuses values with a gradient."""


class PagedAttention:
    """torch's PagedAttention: pages of rows of a batch, and masks of physical positions.

    Names, arguments and results are torch's. What is right here and wrong there (torch 2.13):

    - erase forgets the mapping of the pages it gives back, so that a later owner's tokens are not
      attended to by the erased row;
    - a mask converted for some rows of the table (batch_idx) asks those rows, not rows 0, 1, ...;
    - without kv_len, keys past the last assigned position are masked, not only unreserved pages;
    - a page that is listed but not reserved is left out, instead of page -1 being read.

    Attributes:
        n_pages, page_size: as given.
        page_table: [max_batch_size, n_pages] int64, logical page -> physical page, -1 if none.
        physical_to_logical: the same inverted.
        capacity: [max_batch_size] int64, reserved tokens.
        lengths: [max_batch_size] int64, one past the last position that was assigned.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        max_batch_size: int,
        device: torch.device | str = "cuda",
    ) -> None:
        check_page_size(page_size)
        self.n_pages = n_pages
        self.page_size = page_size
        self.page_table = torch.full((max_batch_size, n_pages), -1, device=device)
        self.physical_to_logical = torch.full_like(self.page_table, -1)
        self.capacity = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros_like(self.capacity)
        self._allocator = PageAllocator(n_pages)

    @property
    def empty_pages(self) -> list[int]:
        """Pages that nobody has reserved."""
        return [p for p in range(self.n_pages) if not self._allocator.owners(p)]

    def reserve(self, batch_idx: torch.Tensor, seq_len: torch.Tensor) -> None:
        """Give row batch_idx ([1]) room for seq_len ([1]) tokens.

        Raises:
            OutOfPagesError: there are not enough pages; nothing was changed.
            ShapeError, OptionError: there is no such row, or seq_len is no number of tokens.
        """
        row, wanted = self._row(batch_idx), _one("seq_len", seq_len)
        if wanted < 0:
            raise ShapeError(f"seq_len is {wanted}; a row has 0 tokens or more.")
        held = int(self.capacity[row]) // self.page_size
        more = -(-wanted // self.page_size) - held
        if more <= 0:
            return
        try:
            found = self._allocator.allocate(more)
        except errors.OutOfPagesError as error:
            raise OutOfPagesError(*error.args) from None
        pages = torch.tensor(found, device=self.page_table.device)
        places = torch.arange(held, held + more, device=pages.device)
        self.page_table[row, places] = pages
        self.physical_to_logical[row, pages] = places
        self.capacity[row] += more * self.page_size

    def erase(self, batch_idx: torch.Tensor) -> None:
        """Forget row batch_idx ([1]) and give its pages back."""
        row = self._row(batch_idx)
        held = self.page_table[row]
        self._allocator.release(held[held >= 0].tolist())
        self.page_table[row] = -1
        self.physical_to_logical[row] = -1
        self.capacity[row] = 0
        self.lengths[row] = 0

    def assign(
        self,
        batch_idx: torch.Tensor,
        input_pos: torch.Tensor,
        k_val: torch.Tensor,
        v_val: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Write keys and values to logical positions.

        Args:
            batch_idx: [B] rows of the table. input_pos: [B, S] positions, reserved before.
            k_val: [B, H, S, D]; v_val: [B, H, S, Dv].
            k_cache: [1, H, n_pages * page_size, D]; v_cache likewise. Made with finite values: a
                converted mask hides unwritten rows, but hidden values are multiplied by 0.
        Raises:
            ShapeError: sizes do not fit together, or a position is not reserved.
            DeviceError: they are not all where the page table is.
            OptionError: k_val or v_val requires grad.
        """
        self._check_new(k_val, v_val, k_cache, v_cache)
        B, S = k_val.size(0), k_val.size(2)
        if tuple(batch_idx.shape) != (B,) or tuple(input_pos.shape) != (B, S):
            raise ShapeError(
                f"batch_idx is {list(batch_idx.shape)} and input_pos {list(input_pos.shape)}; for "
                f"these values they must be [{B}] and [{B}, {S}]."
            )
        outside = (batch_idx < 0) | (batch_idx >= self.page_table.size(0))
        if bool(outside.any()):
            self._row(batch_idx[outside][0])
        wrong = (input_pos < 0) | (input_pos >= self.capacity[batch_idx][:, None])
        if bool(wrong.any()):
            if int(input_pos.min()) < 0:
                raise ShapeError(
                    f"input_pos goes down to {int(input_pos.min())}; positions begin at 0. Leave "
                    "out what is not to be written."
                )
            raise ShapeError(
                f"input_pos goes up to {int(input_pos.max())}, but rows {batch_idx.tolist()} have "
                f"room for {self.capacity[batch_idx].tolist()} tokens. Call reserve first."
            )
        pages = self.page_table[batch_idx].gather(1, input_pos.long() // self.page_size)
        rows = (pages * self.page_size + input_pos % self.page_size).flatten()  # [B * S]
        for new, cache in ((k_val, k_cache), (v_val, v_cache)):
            cache[0, :, rows] = new.transpose(0, 1).flatten(1, 2).to(cache.dtype)
        if S:
            ends = torch.maximum(self.lengths[batch_idx], input_pos.long().amax(1) + 1)
            self.lengths[batch_idx] = ends

    def _check_new(
        self,
        k_val: torch.Tensor,
        v_val: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Raise unless both can be written: nothing is, if one cannot."""
        B, H, S, D = k_val.shape
        room = self.n_pages * self.page_size
        for name, new, cache, width in (
            ("k", k_val, k_cache, D),
            ("v", v_val, v_cache, v_val.size(3)),
        ):
            if new.requires_grad:
                raise OptionError(f"{name}_val requires grad; a cache keeps no history. Detach it.")
            if tuple(cache.shape) != (1, H, room, width) or tuple(new.shape[:3]) != (B, H, S):
                raise ShapeError(
                    f"{name}_val is {list(new.shape)} and {name}_cache {list(cache.shape)}; they "
                    f"must be [{B}, {H}, {S}, D] and [1, {H}, {room}, D]."
                )
            for held, tensor in ((f"{name}_val", new), (f"{name}_cache", cache)):
                if tensor.device != self.page_table.device:
                    raise DeviceError(
                        f"{held} is on {tensor.device}, the page table on "
                        f"{self.page_table.device}; all must be on one device."
                    )

    def convert_logical_block_mask(
        self,
        block_mask: BlockMask,
        batch_idx: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
    ) -> BlockMask:
        """A mask of logical key positions as one of physical ones.

        Args:
            block_mask: its key block is the page size.
            batch_idx: [B] rows of the table that the mask's batch entries are; default: 0, 1, ...
            kv_len: [B] tokens of each batch entry; default: those that were assigned.
        Returns:
            BlockMask [B, H, Q_LEN, n_pages * page_size]. The table may change later only if the
            mask is converted again.
        Raises:
            ShapeError: key blocks are no pages, or batch_idx and kv_len are not of the mask's batch
                or of rows that exist.
        """
        lists, page_size = block_mask.lists(), self.page_size
        if lists.kv_block != page_size:
            raise ShapeError(
                f"block_mask has key blocks of {lists.kv_block} tokens and pages have {page_size}; "
                f"they must be equal. Build it with BLOCK_SIZE=({lists.q_block}, {page_size})."
            )
        rows = self._rows(batch_idx, block_mask.shape[0] if len(block_mask.shape) == 4 else 1)
        B, grid = rows.numel(), lists.grid
        kv_len = self.lengths[rows] if kv_len is None else self._listed("kv_len", kv_len, B)
        grid = TileGrid(
            B, grid.num_heads, grid.q_len, self.n_pages * page_size, grid.q_block, page_size
        )
        per_entry = grid.num_heads * grid.num_q_blocks
        owner, logical = lists.entry_rows(), (lists.entries >> 1).long()
        partial = (lists.entries & 1).long()
        entry = owner // per_entry  # of the mask's batch
        if lists.num_batches == 1:
            copies = torch.arange(B, device=owner.device).repeat_interleave(owner.numel())
            owner, logical, partial = (x.repeat(B) for x in (owner, logical, partial))
            owner, entry = owner + copies * per_entry, copies
        end = kv_len.to(logical.device)[entry]
        physical = self.page_table[rows][entry, logical.clamp(max=self.n_pages - 1)]
        kept = (physical >= 0) & (logical * page_size < end) & (logical < self.n_pages)
        cut = ((logical + 1) * page_size > end).long()
        entries = physical * 2 + (partial | cut)
        made = lists_from_keys(grid, owner[kept], entries[kept])
        mod = self.get_mask_mod(block_mask.mask_mod, kv_len, rows)
        return BlockMask.from_lists(made, mod, (B, grid.num_heads))

    def get_mask_mod(
        self,
        mask_mod: Mod | None,
        kv_len: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
    ) -> Mod:
        """A mask_mod of logical positions as one of physical positions.

        Args:
            kv_len: [B] tokens of each batch entry; default: those that were assigned by then.
            batch_idx: [B] rows of the table that batch entries are; default: 0, 1, ...
        """
        inner, page_size = noop_mask if mask_mod is None else mask_mod, self.page_size
        table, ends = self._mapping(kv_len, batch_idx)

        def physical_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            page = table[b, kv_idx // page_size]
            logical = page * page_size + kv_idx % page_size
            live = (page >= 0) & (logical < ends[b])
            return live & inner(b, h, q_idx, torch.where(live, logical, 0))

        return physical_mask

    def get_score_mod(
        self,
        score_mod: Mod | None,
        kv_len: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
    ) -> Mod:
        """A score_mod of logical positions as one of physical positions, -inf where there is no
        token; arguments as for `get_mask_mod`."""
        page_size = self.page_size
        table, ends = self._mapping(kv_len, batch_idx)

        def physical_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            page = table[b, kv_idx // page_size]
            logical = page * page_size + kv_idx % page_size
            live = (page >= 0) & (logical < ends[b])
            logical = torch.where(live, logical, 0)
            changed = score if score_mod is None else score_mod(score, b, h, q_idx, logical)
            return torch.where(live, changed, -float("inf"))

        return physical_score

    def kv(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, batch_idx: torch.Tensor | None = None
    ) -> PagedKV:
        """The same keys and values for flex_attention(query, kv), with logical masks and mods as
        they are: nothing is converted. Queries are the newest tokens of each row.

        Args:
            k_cache, v_cache: as for `assign`. batch_idx: [B] rows of the table; default: all.
        """
        rows = self._rows(batch_idx)
        lengths = self.lengths[rows]
        longest = int(lengths.max()) if rows.numel() else 0
        width = max(1, -(-longest // self.page_size))
        pages = self.page_table[rows, :width].clamp(min=0).int()
        table = PageTable(lengths.int(), None, pages.contiguous(), self.page_size, longest)
        key, value = (
            cache[0].unflatten(1, (self.n_pages, self.page_size)).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        return PagedKV(key, value, table)

    def _mapping(
        self, kv_len: torch.Tensor | None, batch_idx: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(physical -> logical page, length) of each batch entry; views where rows are all, so that
        a mod sees what is reserved and assigned later."""
        table, ends = self.physical_to_logical, self.lengths
        if batch_idx is not None:
            batch_idx = self._listed("batch_idx", batch_idx)
            table, ends = table[batch_idx], ends[batch_idx]
        return table, ends if kv_len is None else kv_len

    def _rows(self, batch_idx: torch.Tensor | None, count: int | None = None) -> torch.Tensor:
        """Rows of the table that batch entries are; count: those of a mask, 1 that all share."""
        if batch_idx is None:
            count = self.page_table.size(0) if count is None else count
            batch_idx = torch.arange(count, device=self.page_table.device)
        rows = self._listed("batch_idx", batch_idx)
        if count not in (None, 1, rows.numel()):
            raise ShapeError(
                f"batch_idx names {errors.counted(rows.numel(), 'row')}, but block_mask has "
                f"{count} batch entries; one row each. Build the mask with B={rows.numel()}."
            )
        return rows.long()

    def _listed(self, name: str, given: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """The same, found to be [B]; rows of the table, where no count of lengths is given. Those
        on a device are not read."""
        if not isinstance(given, torch.Tensor):
            raise OptionError(f"{name} is {given!r}; it must be a tensor [B] of integers.")
        if given.dim() != 1 or count not in (None, given.numel()):
            wanted = "[B]" if count is None else f"[{count}], a length each"
            raise ShapeError(f"{name} is {list(given.shape)}; it must be {wanted}.")
        if count is None and given.device.type == "cpu" and given.numel():
            self._row(given.min())
            self._row(given.max())
        return given

    def _row(self, batch_idx: torch.Tensor) -> int:
        row = _one("batch_idx", batch_idx)
        if not 0 <= row < self.page_table.size(0):
            raise ShapeError(
                f"batch_idx is {row}; the table has rows 0 to {self.page_table.size(0) - 1}."
            )
        return row


def _one(name: str, given: Any) -> int:
    """The whole number that something holds.

    Raises:
        OptionError: it holds none, or several.
    """
    is_bool = isinstance(given, bool) or getattr(given, "dtype", None) == torch.bool
    try:
        if is_bool:
            raise TypeError
        return operator.index(given)
    except TypeError:
        raise OptionError(
            f"{name} is {given!r}; it must be a whole number, in a tensor of one element."
        ) from None


__all__ = ["OutOfPagesError", "PagedAttention"]
