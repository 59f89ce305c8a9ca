"""Which pages are in use, and by how many sequences. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnloom.errors import OptionError, OutOfPagesError, counted

MOST = (1 << 31) - 3  # pages beside two of a cache's own, in the 32 bits of a table


class PageAllocator:
    """Counts the owners of num_pages pages and hands out those without any.

    Every operation is all or nothing: one that raises has changed nothing. Pages are handed out
    latest freed first, whose memory is most likely still cached; fresh ones in ascending order.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise OptionError(f"num_pages is {num_pages}; it must be 0 or more.")
        if num_pages > MOST:
            raise OptionError(f"num_pages is {num_pages}; a table names up to {MOST}.")
        self.num_pages = num_pages
        self._owners = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """How many sequences hold a page; 0 if it is free."""
        return self._owners[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages that now have one owner each.

        Raises:
            OutOfPagesError: fewer are free.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{counted(count, 'page', 'are')} needed and {len(self._free)} of {self.num_pages} "
                "are free. Free a sequence, or make the cache with more pages; nothing was "
                "changed."
            )
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page, all of which have owners."""
        pages = list(pages)
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be shared"
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner off each page; those without any become free."""
        pages = list(pages)
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free already"
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def compaction(self) -> dict[int, int]:
        """Moves that would bring all used pages to the lowest numbers: old page -> new page.

        No page is both read and written, so that they can be copied in any order.
        """
        num_used = self.num_pages - len(self._free)
        holes = sorted(page for page in self._free if page < num_used)
        beyond = (page for page in range(num_used, self.num_pages) if self._owners[page])
        return dict(zip(beyond, holes, strict=True))

    def move(self, moves: dict[int, int]) -> None:
        """Rename pages as `compaction` says; afterwards the free pages are the highest ones."""
        for old, new in moves.items():
            assert self._owners[old] and not self._owners[new], f"page {old} cannot become {new}"
            self._owners[new], self._owners[old] = self._owners[old], 0
        self._free = [p for p in range(self.num_pages - 1, -1, -1) if not self._owners[p]]

    def check(self) -> None:
        """AssertionError unless every page is free exactly if it has no owner."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._owners[page] == 0 for page in self._free), "an owned page is free"
        assert len(self._free) == self._owners.count(0), "a page without an owner is not free"

    def state(self) -> dict[str, Any]:
        """All of it, as lists and numbers."""
        return {"owners": list(self._owners), "free": list(self._free)}

    @classmethod
    def from_state(cls, owners: Sequence[int], free: Sequence[int]) -> PageAllocator:
        """The allocator that `state` described."""
        made = cls(len(owners))
        made._owners, made._free = list(owners), list(free)
        made.check()
        return made
