"""Which beginnings of texts are in the cache already, whole pages at a time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from attnloom.paged import PagedKVCache


class PrefixIndex:
    """Finds pages that hold the beginning of a prompt, and keeps those of ended sequences until
    their room is needed.

    A page is known by a digest of its tokens and of all before them, so that two texts share pages
    exactly as far as they agree.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        # digest of a page -> the sequences that have it, the latest last
        self._holders: dict[bytes, dict[int, None]] = {}
        self._digests: dict[int, list[bytes]] = {}  # of the published pages of a sequence
        self._ended: OrderedDict[int, None] = OrderedDict()  # kept sequences, oldest use first

    @property
    def num_kept(self) -> int:
        """Ended sequences whose pages are kept."""
        return len(self._ended)

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, int] | None:
        """The sequence that holds the longest beginning of tokens, and its length.

        Args:
            limit: at most so many tokens.
        """
        found = None
        page_size = self._cache.page_size
        for i, digest in enumerate(_digests(tokens[:limit], page_size, b"")):
            holders = self._holders.get(digest)
            if not holders:
                break
            found = (next(reversed(holders)), (i + 1) * page_size)
        if found and found[0] in self._ended:
            self._ended.move_to_end(found[0])
        return found

    def publish(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """Let others find the whole pages of the first `length` tokens, all of which the cache
        holds."""
        known = self._digests.setdefault(sequence, [])
        page_size = self._cache.page_size
        first = len(known) * page_size
        if length - first < page_size:  # nearly always: a page fills once in page_size steps
            return
        for digest in _digests(tokens[first:length], page_size, known[-1] if known else b""):
            known.append(digest)
            self._holders.setdefault(digest, {})[sequence] = None

    def end(self, sequence: int) -> None:
        """Keep the published pages of a sequence, give back the others."""
        num_pages = len(self._digests.get(sequence, ()))
        if num_pages:
            self._cache.truncate(sequence, num_pages * self._cache.page_size)
            self._ended[sequence] = None
        else:
            self.forget(sequence)

    def forget(self, sequence: int) -> None:
        """Free a sequence; pages that others share stay theirs."""
        for digest in self._digests.pop(sequence, ()):
            holders = self._holders[digest]
            del holders[sequence]
            if not holders:
                del self._holders[digest]
        self._ended.pop(sequence, None)
        self._cache.free(sequence)

    def give_up_one(self) -> bool:
        """Free the ended sequence that was not used for the longest time; False without any."""
        oldest = next(iter(self._ended), None)
        if oldest is None:
            return False
        self.forget(oldest)
        return True


def _digests(tokens: Sequence[int], page_size: int, before: bytes) -> Iterator[bytes]:
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = ",".join(map(str, tokens[start : start + page_size]))
        before = hashlib.blake2b(before + page.encode(), digest_size=16).digest()
        yield before
