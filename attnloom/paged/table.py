"""PageTable: where the tokens of a batch lie. PagedKV: keys and values with their table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError, counted

SMALLEST_PAGE, LARGEST_PAGE = 16, 1 << 20


@dataclass(frozen=True, slots=True)
class PageTable:
    """How long each sequence of a batch is, and in which pages its keys and values lie.

    Kernels read the tensors when they run: changed in place, also between replays of a CUDA graph,
    they say the new lengths and pages, and no mask has to be made again.

    Query row i of batch entry b stands at position lengths[b] - counts[b] + i, and sees keys
    0 .. lengths[b] - 1 as far as the mask keeps them.

    Attributes:
        lengths: [B] int32, keys of each sequence. Rows of a page from there on are never used,
            whatever they hold.
        counts: [B] int32, queries of each sequence, the newest of its tokens; further rows of query
            are padding and give 0. None: as many as query has rows.
        pages: [B, width] int32: token t of sequence b is row t % page_size of page
            pages[b, t // page_size]. Entries past a sequence's end are not read. None: sequence b
            is row b of [B, Hkv, KV_LEN, D] tensors.
        page_size: tokens a page, a power of two from 16; 0 without pages.
        max_length: no length is greater, now or later; plans and masks are checked against it.
    """

    lengths: torch.Tensor
    counts: torch.Tensor | None
    pages: torch.Tensor | None
    page_size: int
    max_length: int

    def __post_init__(self) -> None:
        if self.pages is None:
            tensors = [("lengths", self.lengths, 1), ("counts", self.counts, 1)]
        else:
            check_page_size(self.page_size)
            tensors = [
                ("lengths", self.lengths, 1),
                ("counts", self.counts, 1),
                ("pages", self.pages, 2),
            ]
        for name, tensor, rank in tensors:
            if tensor is not None:
                _check_tensor(name, tensor, rank, self.lengths)
        if self.pages is not None and self.max_length > self.pages.size(1) * self.page_size:
            raise ShapeError(
                f"max_length is {self.max_length}, but {self.pages.size(1) * self.page_size} "
                f"tokens fit into {counted(self.pages.size(1), 'page')} of {self.page_size}. Give "
                "pages more columns."
            )

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.lengths.size(0)

    def on_host(self, q_len: int) -> tuple[list[int], list[int]]:
        """Lengths and counts as Python ints; waits for the device."""
        lengths = self.lengths.tolist()
        counts = [q_len] * self.batch if self.counts is None else self.counts.tolist()
        return lengths, counts


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one layer in pages, for flex_attention(query, kv).

    Attributes:
        key: [num_pages, Hkv, page_size, D], any strides; a page of a head is one piece of memory.
        value: [num_pages, Hkv, page_size, Dv].
        table: which of the pages belong to which sequence.
    """

    key: torch.Tensor
    value: torch.Tensor
    table: PageTable

    def __post_init__(self) -> None:
        table = self.table
        if not isinstance(table, PageTable) or table.pages is None:
            raise OptionError("PagedKV needs a PageTable with pages.")
        for name, tensor in (("key", self.key), ("value", self.value)):
            if tensor.dim() != 4 or tensor.size(2) != table.page_size:
                raise ShapeError(
                    f"{name} is {list(tensor.shape)}; pages of {table.page_size} tokens are "
                    f"[num_pages, Hkv, {table.page_size}, D]."
                )
            if tensor.device != table.device:
                raise DeviceError(
                    f"{name} is on {tensor.device}, its table on {table.device}; both must be on "
                    "one device."
                )


def check_contents(table: PageTable, q_len: int, num_pages: int | None) -> None:
    """What the tensors of a table on the CPU say, against queries of q_len rows and, unless keys do
    not lie in pages, num_pages pages. On other devices only kernels know it.

    Raises:
        ShapeError: a length, a count or a page of a sequence is out of range.
    """
    if table.device.type != "cpu":
        return
    lengths = table.lengths.numpy()
    _check_range("lengths", lengths, 0, table.max_length, "max_length of the table")
    if table.counts is not None:
        counts = table.counts.numpy()
        _check_range("counts", counts, 0, q_len, "the rows of query")
        _check_range("counts", counts, 0, lengths, "its length, as queries are its newest tokens")
    if table.pages is None or num_pages is None:
        return
    pages = table.pages.numpy()
    used = np.arange(pages.shape[1]) * table.page_size < lengths[:, None]
    wrong = used & ((pages < 0) | (pages >= num_pages))
    if wrong.any():
        b, column = (int(i) for i in np.argwhere(wrong)[0])
        first = column * table.page_size
        raise ShapeError(
            f"pages[{b}, {column}] is {int(pages[b, column])}, but key has {num_pages} pages, 0 to "
            f"{num_pages - 1}; tokens {first} to "
            f"{min(first + table.page_size, int(lengths[b])) - 1} of sequence {b} would lie there. "
            "Entries past the end of a sequence may hold anything."
        )


def _check_range(
    name: str, numbers: np.ndarray, low: int, high: int | np.ndarray, bound: str
) -> None:
    wrong = (numbers < low) | (numbers > high)
    if wrong.any():
        b = int(np.argmax(wrong))
        limit = int(high[b]) if isinstance(high, np.ndarray) else high
        raise ShapeError(
            f"{name}[{b}] is {int(numbers[b])}; it must be {low} to {limit} ({bound}). Kernels "
            "read the table as it is when they run: correct it, or give it a larger bound."
        )


def check_page_size(page_size: object) -> None:
    """Raises OptionError unless it is a power of two from 16."""
    if (
        not isinstance(page_size, int)
        or not SMALLEST_PAGE <= page_size <= LARGEST_PAGE
        or page_size & (page_size - 1)
    ):
        raise OptionError(
            f"page_size is {page_size!r}; it must be a power of two from {SMALLEST_PAGE}, so that "
            "tiles and pages do not straddle. Use 16, 32, 64, 128 or 256."
        )


def _check_tensor(name: str, tensor: torch.Tensor, rank: int, lengths: torch.Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise DtypeError(f"{name} is {tensor.dtype}; a PageTable holds int32. Use {name}.int().")
    if tensor.dim() != rank or tensor.size(0) != lengths.size(0):
        raise ShapeError(
            f"{name} is {list(tensor.shape)}, lengths {list(lengths.shape)}; they must be "
            f"{'[B]' if rank == 1 else '[B, width]'} and [B]."
        )
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} is not contiguous; kernels read it as it lies in memory.")
    if tensor.device != lengths.device:
        raise DeviceError(
            f"{name} is on {tensor.device}, lengths on {lengths.device}; a PageTable lies on one "
            "device."
        )
