"""Random operations on a PageBook beside a model that knows every token's page content."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field

from attnloom.errors import OutOfPagesError
from attnloom.paged.book import DROPPED, PageBook

OPERATIONS = ("new", "extend", "reserve", "fork", "truncate", "drop", "free", "compact", "reload")
_WEIGHTS = (6, 40, 4, 10, 8, 6, 8, 1, 1)


@dataclass
class Model:
    """What a cache would hold: memory[page][offset] is the token written there last.

    wanted: for each sequence the tokens that it must read back; None where it dropped them.
    """

    book: PageBook
    rng: random.Random
    memory: list[list[object]]
    wanted: dict[int, list[object]] = field(default_factory=dict)
    num_written: int = 0
    num_refused: int = 0

    @classmethod
    def make(cls, seed: int, num_pages: int, page_size: int) -> Model:
        memory: list[list[object]] = [[None] * page_size for _ in range(num_pages)]
        return cls(PageBook(num_pages, page_size), random.Random(seed), memory)

    def step(self) -> None:
        """One random operation; one that is refused must change nothing."""
        name = self.rng.choices(OPERATIONS, _WEIGHTS)[0]
        if name not in ("new", "compact", "reload") and not self.wanted:
            name = "new"
        getattr(self, name)()

    def some(self) -> int:
        return self.rng.choice(list(self.wanted))

    def new(self) -> None:
        if len(self.wanted) < 40:
            self.wanted[self.book.new()] = []

    def extend(self) -> None:
        size = min(len(self.wanted), self.rng.randint(1, 6))
        sequences = self.rng.sample(list(self.wanted), size)
        longest = self.rng.choice((1, 3, 40))
        counts = [self.rng.randint(0, longest) for _ in sequences]
        before = self.book.state()
        try:
            copies = self.book.extend(sequences, counts)
        except OutOfPagesError:
            assert self.book.state() == before
            self.num_refused += 1
            return
        assert not {old for old, _ in copies} & {new for _, new in copies}
        for old, new in copies:
            self.memory[new] = list(self.memory[old])
        for sequence, count in zip(sequences, counts, strict=True):
            wanted, pages = self.wanted[sequence], self.book.pages(sequence)
            for _ in range(count):
                place, offset = divmod(len(wanted), self.book.page_size)
                self.num_written += 1
                self.memory[pages[place]][offset] = self.num_written
                wanted.append(self.num_written)

    def reserve(self) -> None:
        sequence, before, count = self.some(), self.book.state(), self.rng.randint(0, 60)
        has_room = self.book.has_room(sequence, count)
        try:
            for old, new in self.book.extend([sequence], [count], True):
                self.memory[new] = list(self.memory[old])
        except OutOfPagesError:
            assert self.book.state() == before and not has_room
            self.num_refused += 1
            return
        assert has_room == (self.book.state() == before)

    def fork(self) -> None:
        sequence = self.some()
        wanted = self.wanted[sequence]
        length = self.rng.randint(0, len(wanted))
        if self.can_go_on(sequence, length) and len(self.wanted) < 40:
            self.wanted[self.book.fork(sequence, length)] = wanted[:length]

    def truncate(self) -> None:
        sequence = self.some()
        length = self.rng.randint(0, len(self.wanted[sequence]))
        if self.can_go_on(sequence, length):
            self.book.truncate(sequence, length)
            del self.wanted[sequence][length:]

    def can_go_on(self, sequence: int, length: int) -> bool:
        place, offset = divmod(length, self.book.page_size)
        return not offset or self.book.pages(sequence)[place] != DROPPED

    def drop(self) -> None:
        sequence = self.some()
        wanted = self.wanted[sequence]
        position = self.rng.randint(0, len(wanted))
        self.book.drop_before(sequence, position)
        gone = position // self.book.page_size * self.book.page_size
        wanted[:gone] = [None] * gone

    def free(self) -> None:
        sequence = self.some()
        self.book.free([sequence])
        del self.wanted[sequence]

    def compact(self) -> None:
        moves = self.book.compact()
        assert not set(moves) & set(moves.values())
        for old, new in moves.items():
            self.memory[new] = list(self.memory[old])
        used = self.book.allocator.num_pages - self.book.allocator.num_free
        assert all(page < used for s in self.wanted for page in self.book.pages(s))

    def reload(self) -> None:
        self.book = PageBook.from_state(self.book.state())

    def check(self) -> None:
        """Every sequence reads its own tokens back, and no page is lost or counted wrong."""
        self.book.check()
        assert self.book.sequences == list(self.wanted)
        for sequence, wanted in self.wanted.items():
            pages, size = self.book.pages(sequence), self.book.page_size
            assert self.book.length(sequence) == len(wanted)
            for i, token in enumerate(wanted):
                page = pages[i // size]
                if token is None:
                    assert page == DROPPED
                else:
                    assert self.memory[page][i % size] == token, (sequence, i)


def run(seed: int, num_operations: int, check_every: int) -> Model:
    """Random operations with checks in between; afterwards all pages come back."""
    model = Model.make(seed, num_pages=60, page_size=16)
    for i in range(num_operations):
        model.step()
        if i % check_every == 0:
            model.check()
    model.check()
    model.book.free(list(model.wanted))
    model.wanted.clear()
    model.check()
    assert model.book.allocator.num_free == model.book.allocator.num_pages
    return model


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    began = time.perf_counter()
    done = run(seed=0, num_operations=total, check_every=100)
    print(
        f"{total:,} operations, {done.num_written:,} tokens, {done.num_refused:,} refusals, "
        f"no page lost or shared by mistake; {time.perf_counter() - began:.0f} s"
    )
