"""PageTable: where the tokens of a batch lie. PagedKV: keys and values with their table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError, counted

SMALLEST_PAGE, LARGEST_PAGE = 16, 1 << 20


class _Watch:
    """Remembers at which versions of a table's tensors its contents were found in order."""

    __slots__ = ("_found", "_tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._found: list[int | None] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of a table has other tensors, and asks each time

    def holds(self, *rest: int | None) -> bool:
        """Whether this was noted, and nothing changed since."""
        return [*rest, *[t._version for t in self._tensors]] == self._found

    def note(self, *rest: int | None) -> None:
        """What was in order, against these arguments of the check."""
        self._found = [*rest, *[t._version for t in self._tensors]]


@dataclass(frozen=True, slots=True, eq=False)
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
            are padding and give 0. None: as many as query has rows, or none of a sequence without
            tokens. A sequence of fewer tokens than queries is refused on the CPU; on a device,
            where nobody reads either before the kernels, rows before its first token give 0.
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
    _watch: _Watch | None = field(default=None, init=False, repr=False, compare=False)

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


class Hold(Protocol):
    """Of pages that sequences have."""

    def check(self) -> None:
        """Raise OptionError if they have them no longer."""
        ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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
    # of the batch of a cache that it is a layer of
    _hold: Hold | None = field(default=None, init=False, repr=False, compare=False)

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

    def __reduce__(self) -> tuple[type[PagedKV], tuple[torch.Tensor, torch.Tensor, PageTable]]:
        return PagedKV, (self.key, self.value, self.table)  # pages of its own, which nobody takes

    def __repr__(self) -> str:
        key, value = list(self.key.shape), list(self.value.shape)
        return f"PagedKV(key {key}, value {value}, {self.key.dtype}, {self.table})"

    def check_fresh(self) -> None:
        """Raise OptionError if it is of a cache in which one of its sequences lost pages since."""
        if self._hold is not None:
            self._hold.check()


def check_contents(table: PageTable, q_len: int, room: int) -> None:
    """What the tensors of a table on the CPU say, against queries of q_len rows and the room that
    key has: its pages, or the tokens of each sequence where it has none. On other devices only
    kernels know it.

    Raises:
        ShapeError: a length, a count or a page of a sequence is out of range.
    """
    watch = table._watch
    if watch is not None and watch.holds(id(table), q_len, room):
        return
    if table.device.type != "cpu":
        return
    _check_numbers(table, q_len, room)
    if watch is not None:
        watch.note(id(table), q_len, room)


def watched(table: PageTable) -> PageTable:
    """The same table, whose contents are checked again only after one of its tensors changed. For
    tensors that nobody changes but by torch, which counts changes: not those of numpy's memory."""
    if table.device.type == "cpu":  # elsewhere nothing is checked
        tensors = [t for t in (table.lengths, table.counts, table.pages) if t is not None]
        object.__setattr__(table, "_watch", _Watch(tensors))
    return table


def _check_numbers(table: PageTable, q_len: int, room: int) -> None:
    lengths, counts, pages = table.lengths, table.counts, table.pages
    shortest, longest = _ends(lengths)
    limit, bound = table.max_length, _BOUND_OF_PAGES
    if pages is None:
        limit, bound = (room, _BOUND_OF_KEY) if room < limit else (limit, _BOUND_OF_MASK)
    if shortest < 0 or longest > limit:
        _refuse_outside("lengths", lengths, 0, limit, bound)
    if counts is not None:
        fewest, most = _ends(counts)
        if fewest < 0 or most > q_len:
            _refuse_outside("counts", counts, 0, q_len, _BOUND_OF_QUERY)
        if most > shortest:
            _refuse_outside("counts", counts, 0, lengths.numpy(), _BOUND_OF_TOKENS)
    elif shortest < q_len:
        _refuse_shorter(lengths, q_len)
    if pages is not None:
        first, last = _ends(pages)
        if first < 0 or last >= room:
            _refuse_pages(table, pages.numpy(), room)


# What bounds the numbers of a table, and how to give them more room.
_BOUND_OF_PAGES = ("max_length of the table", "give it a larger bound")
_BOUND_OF_MASK = (
    "the tokens that the mask was built for",
    "call for_decode on a mask of longer sequences",
)
_BOUND_OF_KEY = ("the tokens that key has room for", "give a longer key and value")
_BOUND_OF_QUERY = ("the rows of query", "give query more rows")
_BOUND_OF_TOKENS = ("its length, as queries are its newest tokens", "count the new tokens in it")
_FEW = 64  # numbers that Python compares sooner than torch starts an operator


def _ends(numbers: torch.Tensor) -> tuple[int, int]:
    """The least and the greatest; (0, -1) of none. A call over a cache asks each time, so what this
    takes counts: it is nearly always all that is asked."""
    if numbers.numel() <= _FEW:
        listed = (numbers if numbers.dim() == 1 else numbers.flatten()).tolist()
        return (min(listed), max(listed)) if listed else (0, -1)
    least, greatest = torch.aminmax(numbers)
    return int(least.item()), int(greatest.item())


def _refuse_pages(table: PageTable, pages: np.ndarray, num_pages: int) -> None:
    """Raise if a page of a sequence is out of range; entries past its end may be anything."""
    lengths = table.lengths.numpy()
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


def _refuse_shorter(lengths: torch.Tensor, q_len: int) -> None:
    """Raise if a sequence that has tokens has fewer than there are rows of query."""
    numbers = lengths.numpy()
    wrong = (numbers > 0) & (numbers < q_len)
    if wrong.any():
        b = int(np.argmax(wrong))
        raise ShapeError(
            f"lengths[{b}] is {int(numbers[b])}, but without counts all {q_len} rows of query are "
            "the newest of its tokens. Give counts, which say how many there are of each sequence; "
            "further rows are padding."
        )


def _refuse_outside(
    name: str, tensor: torch.Tensor, low: int, high: int | np.ndarray, bound: tuple[str, str]
) -> None:
    """Raise if one of the numbers is out of range.

    bound: what sets it, and what else than another number helps.
    """
    numbers = tensor.numpy()
    wrong = (numbers < low) | (numbers > high)
    if wrong.any():
        b = int(np.argmax(wrong))
        limit = int(high[b]) if isinstance(high, np.ndarray) else high
        raise ShapeError(
            f"{name}[{b}] is {int(numbers[b])}; it must be {low} to {limit} ({bound[0]}). Kernels "
            f"read the table as it is when they run: correct it, or {bound[1]}."
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
