"""PagedBatch: some sequences of a cache for one step, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnloom.errors import OptionError, ShapeError, counted
from attnloom.paged.book import DROPPED
from attnloom.paged.table import PagedKV, PageTable

if TYPE_CHECKING:
    from attnloom.paged.cache import PagedKVCache


_ALIGNED = 4  # int32: each tensor begins at a multiple of 16 bytes, as kernels like it


class PagedBatch:
    """Sequences of a PagedKVCache and their newest tokens, for one step of a model.

    Made by `PagedKVCache.extend`, `append`, `batch` and `empty_batch`. `write` stores the keys and
    values of the step's tokens, `layer` is what flex_attention takes.

    Attributes:
        cache: whose sequences they are.
        sequences: their names; batch entry b is sequences[b]. Further entries are empty.
        table: PageTable of the batch.
        positions: [B, Q_LEN] int64, position of each query row, 0 in padding: what a rotary
            embedding takes.
    """

    def __init__(
        self, cache: PagedKVCache, size: int, q_len: int, width: int, max_length: int
    ) -> None:
        self.cache = cache
        self.sequences: tuple[int, ...] = ()
        device = cache.device
        # One tensor, so that an update is one copy: lengths, counts, then rows of pages, and the
        # rows of the storage that the step's tokens go to.
        sizes = (size, size, size * width, size * q_len, size * q_len)
        rooms = [n + -n % _ALIGNED for n in sizes]
        self._packed = torch.zeros(sum(rooms), dtype=torch.int32, device=device)
        lengths, counts, pages, rows, positions = (
            room[:n] for room, n in zip(self._packed.split(rooms), sizes, strict=True)
        )
        self._rows = rows.view(size, q_len)
        self._positions = positions.view(size, q_len)
        self.table = PageTable(
            lengths,
            counts,
            pages.view(size, width),
            cache.page_size,
            max_length,
        )

    @property
    def size(self) -> int:
        """B: batch entries, empty ones included."""
        return self.table.batch

    @property
    def q_len(self) -> int:
        """Q_LEN: rows of query for each sequence, padding included."""
        return self._rows.size(1)

    @property
    def positions(self) -> torch.Tensor:
        return self._positions.long()

    def update(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Take other sequences, or the same at their present lengths, in place: what a captured
        CUDA graph replays next.

        Args:
            counts: how many of each sequence's newest tokens are queries.
        Raises:
            ShapeError: more sequences, tokens or pages than this batch was made for.
        """
        if len(sequences) > self.size or len(counts) != len(sequences):
            raise ShapeError(
                f"{counted(len(sequences), 'sequence')} and {counted(len(counts), 'count')} for a "
                f"batch of {self.size}; one count each, and no more sequences than that."
            )
        cache, book = self.cache, self.cache.book
        size, q_len = self._rows.shape
        assert self.table.pages is not None
        width = self.table.pages.size(1)
        lengths, numbers, pages = [0] * size, [0] * size, [0] * (size * width)
        rows, positions = [cache.scrap_row] * (size * q_len), [0] * (size * q_len)
        page_size = cache.page_size
        for b, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            length, held = book.length(sequence), book.pages(sequence)
            used = -(-length // page_size)
            if not 0 <= count <= min(length, q_len) or length > self.table.max_length:
                raise ShapeError(
                    f"sequence {sequence} has {counted(length, 'token')}, {count} of them queries; "
                    f"this batch takes {counted(q_len, 'query')} and "
                    f"{counted(self.table.max_length, 'token')} a sequence."
                )
            lengths[b], numbers[b] = length, count
            held = [cache.dropped_page if p == DROPPED else p for p in held[:used]]
            pages[b * width : b * width + used] = held
            at = b * q_len
            for i, t in enumerate(range(length - count, length)):
                rows[at + i] = held[t // page_size] * page_size + t % page_size
                positions[at + i] = t
        flat: list[int] = []
        for part in (lengths, numbers, pages, rows, positions):
            flat += part
            flat += [0] * (-len(part) % _ALIGNED)
        packed = torch.tensor(flat, dtype=torch.int32)
        if self._packed.is_cuda:
            packed = packed.pin_memory()
        self._packed.copy_(packed, non_blocking=True)
        self.sequences = tuple(sequences)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int = 0) -> None:
        """Store keys and values of the step's tokens; rows of padding are ignored.

        Args:
            key: [B, Hkv, Q_LEN, D], converted to the cache's dtype.
            value: [B, Hkv, Q_LEN, Dv].
        Raises:
            ShapeError: other sizes.
        """
        cache = self.cache
        keys, values = cache.layer_tensors(layer)
        for name, new, stored in (("key", key, keys), ("value", value, values)):
            want = (self.size, stored.size(1), self.q_len, stored.size(3))
            if tuple(new.shape) != want:
                raise ShapeError(
                    f"{name} is {list(new.shape)}, but this step writes {list(want)}: [B, Hkv, "
                    "Q_LEN, D] with a row for every query row of the batch, padding included."
                )
            if new.requires_grad and torch.is_grad_enabled():
                raise OptionError(
                    f"{name} requires grad; a cache keeps no history. Run the model under "
                    "torch.no_grad() or torch.inference_mode()."
                )
            rows = self._rows.long()
            page, offset = rows // cache.page_size, rows % cache.page_size
            stored[page, :, offset] = new.transpose(1, 2).to(stored.dtype)

    def layer(self, layer: int = 0) -> PagedKV:
        """Keys and values of a layer, for flex_attention(query, batch.layer(i))."""
        return PagedKV(*self.cache.layer_tensors(layer), self.table)
