"""Which pages a sequence's tokens lie in. Knows nothing of tensors."""

from __future__ import annotations

import numbers
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from attnloom.errors import OptionError, ShapeError, counted
from attnloom.paged.allocator import PageAllocator

DROPPED = -1  # in place of a page that was freed because no window reaches it any more
_INT32 = "i"


def whole(value: Any, name: str) -> int:
    """Python's int of a number of tokens, which may be numpy's or a tensor of one element.

    Raises:
        OptionError: it is none.
    """
    try:
        if isinstance(value, bool):  # arguments in another order, more likely than 1 or 0
            raise TypeError
        return index(value)
    except TypeError:
        raise OptionError(f"{name} is {value!r}; it must be an int.") from None


def check_names(sequences: Any) -> None:
    """Raise OptionError unless sequences may be a list of names; whether it is one is seen when
    they are looked up."""
    if isinstance(sequences, (int, str)) or not hasattr(sequences, "__len__"):
        raise OptionError(
            f"sequences is {sequences!r}; it must be a list of the ints that name them"
            + (f": [{sequences}]." if isinstance(sequences, int) else ".")
        )


def whole_counts(counts: Any, sequences: Sequence[int]) -> list[int]:
    """Python's int for each sequence, from one number for all or one each, in any form.

    Raises:
        OptionError: they are no ints, or sequences is no list.
        ShapeError: there are more or fewer.
    """
    check_names(sequences)
    given = counts.tolist() if hasattr(counts, "tolist") else counts  # of torch or numpy
    try:
        if isinstance(given, bool):  # as in `whole`
            raise TypeError
        if isinstance(given, int):
            return [given] * len(sequences)
        made = [index(count) for count in given]
    except TypeError:
        raise OptionError(
            f"counts is {counts!r}; it must be an int, or an int for each sequence."
        ) from None
    if len(made) != len(sequences):
        raise ShapeError(
            f"{counted(len(sequences), 'sequence')}, but {counted(len(made), 'count')}; one each."
        )
    return made


@dataclass(slots=True)
class _Entry:
    """pages: of the tokens in order, at least those of `length` tokens; DROPPED at the front.
    lost: how often one that held tokens was given up, or another took its place."""

    pages: array[int] = field(default_factory=lambda: array(_INT32))
    length: int = 0
    lost: int = 0


Mark = tuple[_Entry, int]


class PageBook:
    """Sequences of tokens in pages of page_size tokens; a page may belong to several of them.

    Every operation is all or nothing: one that raises has changed nothing. A sequence is named by
    an int that is never given again.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self._entries: dict[int, _Entry] = {}
        self._next = 0
        self.losses = 0  # of all sequences

    @property
    def sequences(self) -> list[int]:
        """Names of the live sequences, oldest first."""
        return list(self._entries)

    def new(self) -> int:
        """A sequence without tokens."""
        return self._add(_Entry())

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, dropped ones included."""
        return self._entry(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """Pages of a sequence in order, reserved ones included; DROPPED where freed before."""
        return self._entry(sequence).pages.tolist()

    def page_array(self, sequence: int) -> array[int]:
        """The same in 32 bits each, to be read at once: it is the book's own."""
        return self._entry(sequence).pages

    def place(self, sequence: int, position: int, is_written: bool = False) -> tuple[int, int]:
        """The page of a token, and its row in there.

        Raises:
            ShapeError: there is no such token, or its page was dropped.
            OptionError: it is to be written, and others share its page.
        """
        entry, position = self._entry(sequence), whole(position, "position")
        if not 0 <= position < entry.length:
            raise ShapeError(
                f"sequence {sequence} has {counted(entry.length, 'token')}; {position} is the "
                "position of none."
            )
        at, row = divmod(position, self.page_size)
        page = entry.pages[at]
        if page == DROPPED:
            raise ShapeError(f"sequence {sequence} dropped the page of token {position}.")
        if is_written and self.allocator.owners(page) > 1:
            raise OptionError(
                f"token {position} of sequence {sequence} lies in a page that another sequence "
                "shares, which would get it too. Only tokens that came after a fork are moved."
            )
        return page, row

    def moved(self, moves: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
        """(page, row) to write and (page, row) to read of each (sequence, position to write,
        position to read); raises as `place`, and where one place is written twice."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for move in moves:
            if not isinstance(move, (tuple, list)) or len(move) != 3:
                raise OptionError(
                    f"a move is {move!r}; it must be (sequence, position to write, position to "
                    "read)."
                )
            sequence, to, at = move
            written = self.place(sequence, to, is_written=True)
            if written in found:
                raise OptionError(
                    f"two moves write token {to} of sequence {sequence}; give one for each place."
                )
            found[written] = self.place(sequence, at)
        return [(*to, *at) for to, at in found.items()]

    def has_room(self, sequence: int, count: int) -> bool:
        """Whether `count` more tokens of a sequence go into pages that it has for itself."""
        return self._has_room(self._entry(sequence), count)

    def extend(
        self, sequences: Sequence[int], counts: Sequence[int], reserve_only: bool = False
    ) -> list[tuple[int, int]]:
        """Make room for `counts` more tokens of each sequence, and count them unless reserve_only.

        Returns:
            (from, to) pages to copy before anything is written: shared pages that get tokens.
        Raises:
            OutOfPagesError: not enough pages for all of them together.
        """
        check_names(sequences)
        if len(set(sequences)) != len(sequences):
            raise OptionError(f"sequences {list(sequences)} names one twice; give each once.")
        entries = [self._entry(s) for s in sequences]
        counts = whole_counts(counts, sequences)
        for sequence, count in zip(sequences, counts, strict=True):
            if count < 0:
                raise ShapeError(f"sequence {sequence} is extended by {count}; 0 tokens or more.")
        if all(
            map(self._has_room, entries, counts)
        ):  # nearly always, where a token comes at a time
            if not reserve_only:
                for entry, count in zip(entries, counts, strict=True):
                    entry.length += count
            return []
        owners, needed = self.allocator.owners, 0
        unshared: list[tuple[_Entry, int]] = []
        claims: dict[int, int] = {}
        for entry, count in zip(entries, counts, strict=True):
            needed += max(0, self._num_pages(entry.length + count) - len(entry.pages))
            for place in self._written(entry, count):
                page = entry.pages[place]
                # the last owner that asks keeps the page: everybody else takes a copy
                if owners(page) - claims.get(page, 0) > 1:
                    claims[page] = claims.get(page, 0) + 1
                    unshared.append((entry, place))
        fresh = self.allocator.allocate(needed + len(unshared))
        copies = []
        for entry, place in unshared:
            self._lose(entry)
            old, entry.pages[place] = entry.pages[place], fresh.pop()
            copies.append((old, entry.pages[place]))
            self.allocator.release([old])
        for entry, count in zip(entries, counts, strict=True):
            lacking = max(0, self._num_pages(entry.length + count) - len(entry.pages))
            entry.pages.extend(fresh[:lacking])
            del fresh[:lacking]
            if not reserve_only:
                entry.length += count
        return copies

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens of another, and shares their
        pages until one of the two writes into them."""
        entry = self._entry(sequence)
        length = entry.length if length is None else whole(length, "length")
        if not 0 <= length <= entry.length:
            raise ShapeError(
                f"sequence {sequence} has {counted(entry.length, 'token')}; a fork of its first "
                f"{length} does not exist."
            )
        self._check_kept(sequence, length)
        pages = entry.pages[: self._num_pages(length)]
        self.allocator.share(p for p in pages if p != DROPPED)
        return self._add(_Entry(pages, length))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all tokens from `length` on, and free the pages that only they and reserved room
        took."""
        entry, length = self._entry(sequence), whole(length, "length")
        if not 0 <= length <= entry.length:
            raise ShapeError(
                f"sequence {sequence} has {counted(entry.length, 'token')}; it cannot be cut to "
                f"{length}."
            )
        self._check_kept(sequence, length)
        kept = self._num_pages(length)
        gone = entry.pages[kept:]
        del entry.pages[kept:]
        if length < entry.length:
            self._lose(entry)
        entry.length = length
        self.allocator.release(p for p in gone if p != DROPPED)

    def drop_before(self, sequence: int, position: int) -> int:
        """Free the pages whose tokens all lie before a position; how many there were.

        Positions of the other tokens stay. For sliding windows: no query may look there again; a
        window that begins before the sequence, at a position below 0, has passed none.
        """
        entry, position = self._entry(sequence), whole(position, "position")
        if position > entry.length:
            raise ShapeError(
                f"sequence {sequence} has {counted(entry.length, 'token')}; position {position} is "
                "not one of them."
            )
        places = range(position // self.page_size)  # empty below 0
        gone = [entry.pages[i] for i in places if entry.pages[i] != DROPPED]
        for i in places:
            entry.pages[i] = DROPPED
        if gone:
            self._lose(entry)
        self.allocator.release(gone)
        return len(gone)

    def free(self, sequences: Iterable[int]) -> None:
        """Forget sequences; their names are never given again."""
        sequences = list(sequences)
        entries = [self._entry(s) for s in dict.fromkeys(sequences)]
        for entry in entries:
            self._lose(entry)
            self.allocator.release(p for p in entry.pages if p != DROPPED)
        for sequence in sequences:
            self._entries.pop(sequence, None)

    def compact(self) -> dict[int, int]:
        """Rename pages so that the used ones are the lowest; old -> new, to be copied."""
        moves = self.allocator.compaction()
        self.allocator.move(moves)
        for entry in self._entries.values():
            if not moves.keys().isdisjoint(entry.pages):
                self._lose(entry)
            entry.pages = array(_INT32, [moves.get(page, page) for page in entry.pages])
        return moves

    def marks(self, sequences: Sequence[int]) -> list[Mark]:
        """What `lost` compares with: how these sequences are now."""
        return [(entry, entry.lost) for entry in map(self._entry, sequences)]

    def lost(self, marks: Sequence[Mark]) -> int | None:
        """The first of the marks whose sequence lost a page since, by its place."""
        return next((i for i, (entry, then) in enumerate(marks) if entry.lost != then), None)

    def check(self) -> None:
        """AssertionError unless the owners of every page are the sequences that list it."""
        self.allocator.check()
        assert self._next > max(self._entries, default=-1), "a name would be given again"
        counted: dict[int, int] = {}
        for entry in self._entries.values():
            held = [p for p in entry.pages if p != DROPPED]
            assert len(set(held)) == len(held), "a sequence lists a page twice"
            assert all(0 <= p < self.allocator.num_pages for p in held), "there is no such page"
            assert entry.length >= 0, "there are fewer tokens than none"
            assert len(entry.pages) >= self._num_pages(entry.length), "tokens without a page"
            for page in held:
                counted[page] = counted.get(page, 0) + 1
        for page in range(self.allocator.num_pages):
            owners = self.allocator.owners(page)
            assert owners == counted.get(page, 0), f"page {page} has {owners} owners"

    def state(self) -> dict[str, Any]:
        """All of it, as lists and numbers."""
        return {
            "page_size": self.page_size,
            "next": self._next,
            "sequences": {s: [e.length, e.pages.tolist()] for s, e in self._entries.items()},
            **self.allocator.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PageBook:
        """The book that `state` described."""
        made = cls(0, state["page_size"])
        made.allocator = PageAllocator.from_state(state["owners"], state["free"])
        made._next = state["next"]
        made._entries = {
            int(s): _Entry(array(_INT32, pages), length)
            for s, (length, pages) in state["sequences"].items()
        }
        made.check()
        return made

    def _entry(self, sequence: int) -> _Entry:
        # 0.0 and False are keys as 0 is
        is_name = isinstance(sequence, numbers.Integral) and not isinstance(sequence, bool)
        if type(sequence) is not int and not is_name:
            raise OptionError(
                f"a sequence is named by an int that `new` or `fork` gave, not by {sequence!r}."
            )
        found = self._entries.get(sequence)
        if found is None:
            raise OptionError(
                f"there is no sequence {sequence}: it was freed, or never made here. Live ones are "
                f"named by `sequences`; there are {len(self._entries)}."
            )
        return found

    def _check_kept(self, sequence: int, length: int) -> None:
        """Raise if the next token would go into a page that was dropped."""
        place, offset = divmod(length, self.page_size)
        if offset and self._entry(sequence).pages[place] == DROPPED:
            raise ShapeError(
                f"sequence {sequence} dropped the page of token {length - 1}; it cannot go on from "
                f"its first {counted(length, 'token')}. Drop pages only as far back as it may be "
                "cut."
            )

    def _lose(self, entry: _Entry) -> None:
        entry.lost += 1
        self.losses += 1

    def _add(self, entry: _Entry) -> int:
        name = self._next
        self._next += 1
        self._entries[name] = entry
        return name

    def _num_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _has_room(self, entry: _Entry, count: int) -> bool:
        """Whether `count` more tokens go into pages that the sequence has for itself."""
        first, end = entry.length, entry.length + count
        if end > len(entry.pages) * self.page_size:
            return False
        if count == 1:
            return self.allocator.owners(entry.pages[first // self.page_size]) == 1
        owners = self.allocator.owners
        return all(owners(entry.pages[place]) == 1 for place in self._written(entry, count))

    def _written(self, entry: _Entry, count: int) -> range:
        """Places of the pages that exist and get some of the next `count` tokens."""
        if not count:
            return range(0)
        first = entry.length // self.page_size
        return range(first, min(self._num_pages(entry.length + count), len(entry.pages)))
