"""PagedBatch: some sequences of a cache for one step, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnloom.errors import DeviceError, DtypeError, OptionError, ShapeError, counted
from attnloom.paged.book import DROPPED, Mark, whole_counts
from attnloom.paged.staged import StagedInts
from attnloom.paged.table import PagedKV, PageTable, watched

if TYPE_CHECKING:
    from attnloom.paged.cache import PagedKVCache


class _Hold:
    """The pages that sequences had at a moment, and whether they still have them. What was made of
    them then asks before it is used; it holds no tensors of its own."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache, self._book = cache, cache.book
        self._sequences: tuple[int, ...] = ()
        self._marks: list[Mark] = []
        self._losses = cache.book.losses  # when the marks were last known to be true
        self._lost: int | None = None

    def take(self, sequences: tuple[int, ...]) -> None:
        """From now on these, as they are."""
        self._book, self._lost = self._cache.book, None
        self._sequences, self._marks = sequences, self._book.marks(sequences)
        self._losses = self._book.losses

    def expire(self, sequences: tuple[int, ...], lost: int) -> None:
        """These, of which the one at a place has lost a page."""
        self._sequences, self._marks, self._lost = sequences, [], lost

    def lost(self) -> int | None:
        """The place of a sequence that lost a page, if one did: until others are taken."""
        book = self._cache.book
        if self._lost is not None or (book is self._book and book.losses == self._losses):
            return self._lost
        if self._marks:
            self._lost = 0 if book is not self._book else book.lost(self._marks)
        if self._lost is None:
            self._book, self._losses = book, book.losses
        return self._lost

    def check(self) -> None:
        """Raise OptionError if one of the sequences lost a page."""
        lost = self.lost()
        if lost is not None:
            raise OptionError(
                f"this batch still has the old pages of sequence {self._sequences[lost]}, which "
                "was freed, cut, moved, or given copies of shared pages since; they may be "
                "another's now. Make a new batch, or `update` this one."
            )


class PagedBatch:
    """Sequences of a PagedKVCache and their newest tokens, for one step of a model.

    Made by `PagedKVCache.extend`, `append`, `batch` and `empty_batch`. `write` stores the keys and
    values of the step's tokens, `layer` is what flex_attention takes. Once one of its sequences was
    freed, cut, moved or given copies of pages, its pages may be another's: both refuse, until
    `update`, and so does flex_attention of what `layer` returned before.

    Attributes:
        cache: whose sequences they are.
        sequences: their names; batch entry b is sequences[b]. Further entries are empty.
        table: PageTable of the batch.
        positions: [B, Q_LEN] int64, position of each query row, 0 in padding: what a rotary
            embedding takes. Changes in place, as the table does.
        rows: [B, Q_LEN, Hkv] int64, where keys and values of the step's tokens go: rows of
            `PagedKVCache.layer_rows`. In place as well.
    """

    def __init__(
        self, cache: PagedKVCache, size: int, q_len: int, width: int, max_length: int
    ) -> None:
        self.cache = cache
        self._width = width
        self.sequences: tuple[int, ...] = ()
        self._staged = StagedInts(
            {
                "lengths": (torch.int32, (size,)),
                "counts": (torch.int32, (size,)),
                "pages": (torch.int32, (size, width)),
                "positions": (torch.int64, (size, q_len)),
                "rows": (torch.int64, (size, q_len, cache.num_kv_heads)),
            },
            cache.device,
        )
        tensors = self._staged.tensors
        self.positions = tensors["positions"]
        self.rows = tensors["rows"]
        table = PageTable(
            tensors["lengths"], tensors["counts"], tensors["pages"], cache.page_size, max_length
        )
        self.table = watched(table)
        self._layers: dict[int, PagedKV] = {}
        self._hold = _Hold(cache)
        # of query rows, of batch entries, and where each head begins in a page
        self._index = (
            np.arange(q_len),
            np.arange(size)[:, None],
            np.arange(cache.num_kv_heads) * cache.page_size,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copies, which would tear apart tensors that share memory."""
        shape = (self.size, self.q_len, self._width, self.table.max_length)
        lost = self._hold.lost()  # which a copy could not know
        return _copied, (self.cache, shape, self.sequences, self._staged.memory, lost)

    def __repr__(self) -> str:
        return (
            f"PagedBatch(of {self.cache!r}: sequences {list(self.sequences)}, {self.q_len} queries "
            f"each at most)"
        )

    @property
    def size(self) -> int:
        """B: batch entries, empty ones included."""
        return self.table.batch

    @property
    def q_len(self) -> int:
        """Q_LEN: rows of query for each sequence, padding included."""
        return self.positions.size(1)

    def update(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Take other sequences, or the same at their present lengths, in place: what a captured
        CUDA graph replays next.

        Args:
            counts: how many of each sequence's newest tokens are queries.
        Raises:
            ShapeError: more sequences, tokens or pages than this batch was made for.
        """
        counts = whole_counts(counts, sequences)
        if len(sequences) > self.size:
            raise ShapeError(
                f"{counted(len(sequences), 'sequence')} and {counted(len(counts), 'count')} for a "
                f"batch of {self.size}; one count each, and no more sequences than that."
            )
        lengths = [self.cache.length(sequence) for sequence in sequences]
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            if count < 0:
                raise ShapeError(f"sequence {sequence} is given {count} queries; 0 or more.")
            if count > length:
                raise ShapeError(
                    f"sequence {sequence} has {counted(length, 'token')}, so that its newest "
                    f"{count} cannot be queries. Ask for fewer, or make a batch without it."
                )
            if count > self.q_len or length > self.table.max_length:
                raise ShapeError(
                    f"sequence {sequence} has {counted(length, 'token')}, {count} of them queries; "
                    f"this batch takes {counted(self.q_len, 'query')} and "
                    f"{counted(self.table.max_length, 'token')} a sequence."
                )
        staging = self._staged.staging()
        into = staging.arrays
        into["lengths"][: len(lengths)] = lengths
        into["counts"][: len(lengths)] = counts
        page_size, pages = self.cache.page_size, into["pages"]
        is_dropped = False
        for row, sequence, length in zip(pages, sequences, lengths, strict=False):
            used = -(-length // page_size)
            held = self.cache.book.page_array(sequence)[:used]
            row[:used] = held
            is_dropped = is_dropped or (used > 0 and held[0] == DROPPED)  # the first ones go first
        if is_dropped:
            np.copyto(pages, self.cache.dropped_page, where=pages == DROPPED)
        self._place(into)
        self._staged.take(staging)
        self.sequences = tuple(sequences)
        self._hold.take(self.sequences)

    def _place(self, into: dict[str, np.ndarray]) -> None:
        """Fill in what follows from lengths, counts and pages: a dozen operators, each of which
        finds the processor's caches taken by the model's weights."""
        index, entry, heads = self._index
        counts, page_size = into["counts"][:, None], self.cache.page_size
        positions, rows = into["positions"], into["rows"]
        np.add(into["lengths"][:, None] - counts, index, out=positions)
        padding = index >= counts
        positions[padding] = 0
        page = into["pages"][entry, positions // page_size]
        page[padding] = self.cache.scrap_page
        first = page * np.int64(len(heads) * page_size)
        first += positions % page_size
        np.add(first[..., None], heads, out=rows)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int = 0) -> None:
        """Store keys and values of the step's tokens; rows of padding are ignored.

        Args:
            key: [B, Hkv, Q_LEN, D], converted to the cache's dtype.
            value: [B, Hkv, Q_LEN, Dv].
        Raises:
            ShapeError: other sizes.
            OptionError: the batch is stale: its sequences lost pages since.
        """
        self._hold.check()
        heads = self.cache.num_kv_heads
        stored = self.cache.layer_rows(layer)
        check_new(self.cache, key, value)
        named = list(zip(("key", "value"), (key, value), stored, strict=True))
        for name, new, rows in named:
            want = (self.size, heads, self.q_len, rows.size(1))
            if new.shape != want:
                raise ShapeError(
                    f"{name} is {list(new.shape)}, but this step writes {list(want)}: [B, Hkv, "
                    "Q_LEN, D] with a row for every query row of the batch, padding included."
                )
        for _, new, rows in named:
            flat = new.transpose(1, 2).reshape(-1, rows.size(1))
            if rows.dtype.itemsize == 1:
                # torch copies no rows of 8-bit numbers; those beyond the greatest become it.
                limit = torch.finfo(rows.dtype).max
                flat = flat.clamp(-limit, limit).to(rows.dtype).view(torch.uint8)
                rows = rows.view(torch.uint8)
            rows.index_copy_(0, self.rows.flatten(), flat.to(rows.dtype))

    def layer(self, layer: int = 0) -> PagedKV:
        """Keys and values of a layer, for flex_attention(query, batch.layer(i)).

        Raises:
            OptionError: the batch is stale: its sequences lost pages since.
        """
        self._hold.check()
        found = self._layers.get(layer)
        if found is None:
            found = PagedKV(*self.cache.layer_tensors(layer), self.table)
            object.__setattr__(found, "_hold", self._hold)
            self._layers[layer] = found
        return found


def _copied(
    cache: PagedKVCache,
    shape: tuple[int, int, int, int],
    names: tuple[int, ...],
    memory: Any,
    lost: int | None = None,
) -> PagedBatch:
    """A batch as it was when it was reduced to these."""
    made = PagedBatch(cache, *shape)
    made._staged.memory.copy_(memory)
    made.sequences = names
    if lost is None:
        made._hold.take(names)
    else:
        made._hold.expire(names, lost)
    return made


def check_mode(cache: PagedKVCache) -> None:
    """Raise unless the cache may be written now."""
    if cache.keys[0].is_inference() and not torch.is_inference_mode_enabled():
        raise OptionError(
            "the cache was made under torch.inference_mode() and can only be written there. Make "
            "it outside: then it can be written in both."
        )


def check_new(cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless keys and values can be stored, whatever their sizes."""
    check_mode(cache)
    for name, new in (("key", key), ("value", value)):
        if not isinstance(new, torch.Tensor):
            raise OptionError(f"{name} is of type {type(new).__name__}; a cache takes tensors.")
        if not new.dtype.is_floating_point:
            raise DtypeError(
                f"{name} is {new.dtype}; a cache of {cache.keys[0].dtype} converts other floating "
                "dtypes alone."
            )
        if new.device != cache.device:
            raise DeviceError(f"{name} is on {new.device}, its cache on {cache.device}.")
        if new.requires_grad and torch.is_grad_enabled():
            raise OptionError(
                f"{name} requires grad; a cache keeps no history. Run the model under "
                "torch.no_grad() or torch.inference_mode()."
            )
