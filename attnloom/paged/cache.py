"""PagedKVCache: keys and values of many sequences of any length, in pages of one size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from attnloom.errors import DtypeError, OptionError, ShapeError, counted
from attnloom.paged.allocator import MOST
from attnloom.paged.batch import PagedBatch, check_mode, check_new
from attnloom.paged.book import PageBook, check_names, whole, whole_counts
from attnloom.paged.saved import restored, state_of
from attnloom.paged.table import PagedKV, check_page_size

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_COPIED_AT_ONCE = 16  # pages, of all layers: what a copy holds beside the cache


class PagedKVCache:
    """Keys and values of many sequences, in pages that are handed out as they grow.

    A step of a model: `extend` the sequences by their new tokens, then for each layer `write` and
    flex_attention on what it returns. A cache of one layer does all of it in `append`. Sequences
    are named by ints that `new` and `fork` give.

    Every operation is all or nothing: when pages run out, OutOfPagesError is raised and nothing has
    changed. Masks and score_mods see positions in the sequence, wherever its pages lie.

    Attributes:
        book: PageBook, the sequences and their pages; knows nothing of tensors.
        keys, values: for each layer [num_pages + 2, Hkv, page_size, D]. One page more stands for
            those that `drop_before` freed: a query that looks there gets NaN, not a wrong number.
            The other takes what padding writes.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a cache without sequences.

        Args:
            num_pages: shared by all sequences and used by all layers alike.
            page_size: tokens a page, a power of two from 16.
            value_dim: Dv; default: head_dim.
            dtype, device: of keys and values; torch's defaults. What is written is converted;
                float8_e4m3fn and float8_e5m2 take half the memory of bfloat16, and what is too
                large for them becomes their greatest number.
        Raises:
            OptionError: a size means nothing.
            DtypeError: attention takes no keys of this dtype.
        """
        check_page_size(page_size)
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"num_pages": num_pages, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes |= {"value_dim": value_dim, "num_layers": num_layers}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise OptionError(f"{name} is {size!r}; it must be an int of 1 or more.")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise DtypeError(
                f"dtype is {dtype!r}; keys and values are {', '.join(map(str, _DTYPES[:-1]))} or "
                f"{_DTYPES[-1]}."
            )
        self.book = PageBook(num_pages, page_size)
        self.page_size = page_size
        self.dropped_page, self.scrap_page = num_pages, num_pages + 1
        shape = (num_layers, num_pages + 2, num_kv_heads, page_size)
        # of all layers, so that pages are copied in one go
        self._stored = tuple(
            torch.empty(*shape, d, dtype=dtype, device=device) for d in (head_dim, value_dim)
        )
        for stored, filling in zip(self._stored, (torch.nan, 0.0), strict=True):
            stored[:, self.dropped_page] = filling
        self._view_layers()

    def _view_layers(self) -> None:
        self.keys, self.values = (list(stored.unbind(0)) for stored in self._stored)
        self._rows = [stored.flatten(1, 3).unbind(0) for stored in self._stored]

    def __getstate__(self) -> dict[str, Any]:
        views = ("keys", "values", "_rows")  # pickle would make memory of its own of each
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view_layers()

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size} tokens, {self.num_free_pages}"
            f" free, {counted(len(self.sequences), 'sequence')}, "
            f"{counted(self.num_layers, 'layer')} of {self.num_kv_heads} x {self.head_dim}, "
            f"{self.dtype}, {self.device})"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def num_pages(self) -> int:
        """Pages for tokens, free ones included."""
        return self.book.allocator.num_pages

    @property
    def head_dim(self) -> int:
        return self.keys[0].size(3)

    @property
    def value_dim(self) -> int:
        return self.values[0].size(3)

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def num_kv_heads(self) -> int:
        return self.keys[0].size(1)

    @property
    def num_free_pages(self) -> int:
        return self.book.allocator.num_free

    @property
    def sequences(self) -> list[int]:
        """Names of the live sequences, oldest first."""
        return self.book.sequences

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.book.length(sequence)

    def layer_tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of keys and of values of a layer, [num_pages + 2, Hkv, page_size, D]."""
        self._check_layer(layer)
        return self.keys[layer], self.values[layer]

    def layer_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as rows, [(num_pages + 2) * Hkv * page_size, D]."""
        self._check_layer(layer)
        keys, values = self._rows
        return keys[layer], values[layer]

    def new(self) -> int:
        """A sequence without tokens."""
        return self.book.new()

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens of another (default: all).

        They share pages until one of them writes into one; that page is then copied.
        """
        return self.book.fork(sequence, length)

    def reserve(self, sequence: int, length: int) -> None:
        """Take the pages now that `length` tokens of a sequence will need.

        Raises:
            OutOfPagesError: there are not enough.
        """
        check_mode(self)
        length = whole(length, "length")
        if length < 0:
            raise ShapeError(f"length is {length}; a sequence has 0 tokens or more.")
        more = max(0, length - self.book.length(sequence))
        if self.book.has_room(sequence, more):  # nearly always, where a token comes at a time
            return
        self._copy(self.book.extend([sequence], [more], reserve_only=True))

    def extend(
        self, sequences: Sequence[int], counts: Sequence[int] | int, q_len: int | None = None
    ) -> PagedBatch:
        """Add tokens to sequences, whose keys and values are then to be written.

        Args:
            sequences: each once; they become the batch entries.
            counts: new tokens of each, or of all.
            q_len: rows of query; default: the greatest count.
        Raises:
            OutOfPagesError: they do not all fit; none was extended.
        """
        counts = whole_counts(counts, sequences)
        if sum(counts) > self.num_pages * self.page_size:
            self.grow(sequences, counts)  # raises: no batch is made for what can never fit
        lengths = [self.length(s) + count for s, count in zip(sequences, counts, strict=True)]
        made = self._room(counts, lengths, q_len)  # before pages are taken: this may fail
        self.grow(sequences, counts)
        made.update(sequences, counts)
        return made

    def grow(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Add tokens to sequences, for a batch that is there already and takes them by
        `PagedBatch.update`.

        Raises:
            OutOfPagesError: they do not all fit; none was extended.
        """
        check_mode(self)
        self._copy(self.book.extend(sequences, counts))

    def append(
        self,
        sequences: Sequence[int],
        key: torch.Tensor,
        value: torch.Tensor,
        counts: Sequence[int] | int | None = None,
    ) -> PagedBatch:
        """Add tokens with their keys and values, in a cache of one layer.

        Args:
            key: [B, Hkv, n, D]; value: [B, Hkv, n, Dv].
            counts: how many of the n tokens exist in each sequence, the first ones; default: all.
        Returns:
            the batch whose queries are these tokens: flex_attention(query, batch.layer()).
        Raises:
            OutOfPagesError: they do not all fit; nothing was written.
        """
        if self.num_layers != 1:
            raise OptionError(
                f"append writes one layer, this cache has {self.num_layers}: use batch = "
                "extend(sequences, counts), then batch.write(key, value, layer) in every layer."
            )
        check_names(sequences)
        check_new(self, key, value)
        n = key.size(2) if key.dim() == 4 else 0
        for name, new, stored in (
            ("key", key, self.keys[0]),
            ("value", value, self.values[0]),
        ):
            if new.dim() != 4:
                raise ShapeError(
                    f"{name} is {list(new.shape)}; append takes 4 dimensions, [B, Hkv, n, D]."
                )
            want = (len(sequences), stored.size(1), n, stored.size(3))
            if tuple(new.shape) != want:
                raise ShapeError(
                    f"{name} is {list(new.shape)}; for {counted(len(sequences), 'sequence')} of "
                    f"this cache it must be {list(want)}."
                )
        counts = whole_counts(n if counts is None else counts, sequences)
        if max(counts, default=0) > n:
            raise ShapeError(
                f"counts goes up to {max(counts)}, but key has {counted(n, 'token')} of a sequence."
            )
        batch = self.extend(sequences, counts, n)
        batch.write(key, value)
        return batch

    def batch(
        self,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | int = 1,
        q_len: int | None = None,
    ) -> PagedBatch:
        """A batch of sequences as they are, whose queries are the newest `counts` tokens of each.

        Args:
            sequences: default: all live ones, oldest first.
            q_len: rows of query; default: the greatest count.
        """
        sequences = self.sequences if sequences is None else sequences
        counts = whole_counts(counts, sequences)
        made = self._room(counts, [self.length(s) for s in sequences], q_len)
        made.update(sequences, counts)
        return made

    def _room(self, counts: list[int], lengths: list[int], q_len: int | None) -> PagedBatch:
        """A batch that takes sequences of these lengths, with so many queries."""
        most = max(0, *counts) if counts else 0
        q_len = most if q_len is None else whole(q_len, "q_len")
        if q_len < most:
            raise ShapeError(
                f"q_len is {q_len}, but a sequence has {counted(most, 'new token')}: each needs a "
                "row of query."
            )
        longest = max(0, *lengths) if lengths else 0
        # a power of two, so that few sizes are met while sequences grow
        width = 1 << (max(1, -(-longest // self.page_size)) - 1).bit_length()
        return PagedBatch(self, len(counts), q_len, width, longest)

    def empty_batch(self, size: int, max_length: int, q_len: int = 1) -> PagedBatch:
        """A batch to be filled by `PagedBatch.update` again and again, in place.

        Args:
            size: sequences at most. max_length: tokens at most in each. q_len: rows of query.
        Raises:
            ShapeError: one is negative, or does not fit 32 bits.
        """
        given = {"size": size, "max_length": max_length, "q_len": q_len}
        sizes = {name: whole(value, name) for name, value in given.items()}
        for name, value in sizes.items():
            if value < 0:
                raise ShapeError(f"{name} is {value}; a batch has room for 0 or more.")
            if value > MOST:
                raise ShapeError(f"{name} is {value}; kernels count to {MOST} in a batch.")
        size, max_length, q_len = sizes.values()
        width = max(1, -(-max_length // self.page_size))
        return PagedBatch(self, size, q_len, width, max_length)

    def layer(self, layer: int = 0, q_len: int = 1) -> PagedKV:
        """Keys and values of all live sequences, the newest q_len tokens of each being queries."""
        return self.batch(None, q_len).layer(layer)

    def move_tokens(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Let tokens hold the keys and values of others, as accepted drafts do that move up.

        Args:
            moves: (sequence, position to write, position to read); all are read before any is
                written.
        Raises:
            ShapeError: a sequence has no such token, or dropped its page.
            OptionError: a page to write to is shared with a fork, two moves write to one place,
                or one is no move.
        """
        check_mode(self)
        places = self.book.moved(moves)
        if places:
            index = torch.tensor(places, dtype=torch.int64).to(self.device)
            page, offset, old_page, old_offset = index.unbind(1)
            for stored in self._stored:
                stored[:, page, :, offset] = stored[:, old_page, :, old_offset]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on, and free pages that only they took."""
        self.book.truncate(sequence, length)

    def drop_before(self, sequence: int, position: int) -> int:
        """Free the pages whose tokens all lie before a position: those that a sliding window has
        passed. A query that still looks there gets NaN.

        Args:
            position: up to the length; at 0 and below there is nothing to free, so that a window's
                begin, `length - window_left`, can be given as it is.
        Returns:
            how many pages this sequence gave up.
        """
        return self.book.drop_before(sequence, position)

    def free(self, sequences: int | Iterable[int]) -> None:
        """Forget sequences and free the pages that no other one shares."""
        self.book.free(sequences if isinstance(sequences, Iterable) else [sequences])

    def defragment(self) -> int:
        """Move pages so that the used ones come first; how many moved. Batches whose pages
        moved are stale: `update` them."""
        check_mode(self)
        moves = self.book.compact()
        self._copy(list(moves.items()))
        return len(moves)

    def state_dict(self) -> dict[str, Any]:
        """Sequences, used pages and what they hold; `load_state_dict` of a cache of the same sizes
        takes it."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the cache whose `state_dict` this is.

        Raises:
            OptionError: it is no state of a cache.
            ShapeError: it has other sizes.
            DtypeError: its keys or values have another dtype.
        """
        check_mode(self)
        self.book = restored(self, state)

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int) or not 0 <= layer < self.num_layers:
            raise OptionError(
                f"layer is {layer!r}; this cache has layers 0 to {self.num_layers - 1}."
            )

    def _copy(self, pages: list[tuple[int, int]]) -> None:
        """Copy whole pages of every layer; none is both read and written."""
        for first in range(0, len(pages), _COPIED_AT_ONCE):
            some = pages[first : first + _COPIED_AT_ONCE]
            source, target = torch.tensor(some, dtype=torch.int64).to(self.device).unbind(1)
            for stored in self._stored:
                stored[:, target] = stored[:, source]
