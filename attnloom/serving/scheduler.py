"""Who takes part in the next step, and with how many tokens. Knows pages, no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from attnloom.errors import OptionError, OutOfPagesError, OverloadedError, counted
from attnloom.paged import PagedKVCache
from attnloom.serving.drafts import DraftTree
from attnloom.serving.prefixes import PrefixIndex
from attnloom.serving.request import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the queue may hold.

    Attributes:
        max_running: sequences that are served at once.
        max_step_tokens: tokens of a step, prompts and drafts included. Longer prompts take
            several steps, beside which others go on decoding.
        max_waiting: requests that may wait; more are refused.
        max_length: tokens of a sequence, prompt and output.
    """

    max_running: int = 64
    max_step_tokens: int = 512
    max_waiting: int = 256
    max_length: int = 2048

    def check(self, model_length: int) -> None:
        """Raise OptionError if one of them means nothing for a model of so many positions."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(
                    f"{field.name} is {value!r}; it must be a whole number, 1 or more."
                )
        if self.max_length > model_length:
            raise OptionError(
                f"max_length is {self.max_length}, but the model knows {model_length} positions."
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in a step: the next `count`, then those of a draft.

    ends: the last token of the sequence is among them, so that what follows can be drawn.
    """

    sequence: Sequence
    count: int
    draft: DraftTree | None

    @property
    def ends(self) -> bool:
        return self.count == self.sequence.num_pending

    @property
    def num_tokens(self) -> int:
        return self.count + (len(self.draft.tokens) if self.draft else 0)


class Scheduler:
    """First come, first served: sequences that decode take part in every step, prompts fill the
    rest of it chunk by chunk, and whoever waits is let in while there is room.

    When pages run out, pages kept of ended sequences go first; then the sequence that came last
    gives its pages back and waits, at the front, to be computed again.
    """

    def __init__(self, cache: PagedKVCache, limits: Limits) -> None:
        self.cache, self.limits = cache, limits
        self.prefixes = PrefixIndex(cache)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_room(self) -> int:
        """Requests that may be queued now."""
        return max(0, self.limits.max_waiting - len(self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: the queue is full.
        """
        if not self.num_room:
            raise OverloadedError(
                f"{counted(len(self.waiting), 'request', 'are')} waiting, the most allowed; try "
                "again later."
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, keep: bool = True) -> None:
        """Take out a sequence that ended or was cancelled; its whole pages stay to be shared.

        Args:
            keep: or do not stay.
        """
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.cached is not None:
            (self.prefixes.end if keep else self.prefixes.forget)(sequence.cached)
            sequence.cached = None

    def preempt_all(self) -> None:
        """Let all running sequences wait again, in their order: what the cache holds of them is
        not known after a step that failed."""
        while self.running:
            self._preempt(self.running[-1])

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """Note how many tokens of a sequence the cache holds now."""
        sequence.num_computed = num_computed
        if sequence.cached is not None:
            self.prefixes.publish(sequence.cached, sequence.tokens, num_computed)

    def schedule(self) -> list[Chunk]:
        """The next step, with pages for all of it reserved; empty if there is nothing to do.

        Raises:
            OutOfPagesError: nobody runs, and whoever waits first finds no pages.
        """
        chunks: dict[Sequence, Chunk] = {}
        left = self.limits.max_step_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):
            if sequence.cached is None:  # preempted a moment ago
                continue
            chunk, before = self._chunk(sequence, left), self.num_preemptions
            if chunk is not None and self._make_room(chunk, chunks):
                chunks[sequence] = chunk
                left -= chunk.num_tokens
            if self.num_preemptions > before:
                left = self._left(chunks)
        while self.waiting and len(self.running) < self.limits.max_running:
            if not self._admit(chunks):
                if not self.running:  # nor will later: only others can give pages back
                    raise OutOfPagesError(self._stuck(self.waiting[0]))
                break
        return list(chunks.values())

    def follow(self, chunks: list[Chunk]) -> list[Chunk] | None:
        """The step after one whose tokens are not known yet, as far as these decide nothing: the
        same sequences, with pages reserved, one token each. None if somebody may join, ends for
        certain, or would have to give way.
        """
        running = self.running
        if len(chunks) != len(running) or (self.waiting and len(running) < self.limits.max_running):
            return None
        for chunk in chunks:
            sequence = chunk.sequence
            left = sequence.request.params.max_tokens - sequence.num_output
            decodes = chunk.count == 1 and chunk.ends and chunk.draft is None
            if sequence.cached is None or not decodes or left < 2:
                return None
        for chunk in chunks:
            name = chunk.sequence.cached
            assert name is not None
            if not self._has_pages(name, self.cache.length(name) + 1):
                return None  # what was reserved stays so
        return [Chunk(chunk.sequence, 1, None) for chunk in chunks]

    def _stuck(self, sequence: Sequence) -> str:
        book = self.cache.book
        return (
            f"request {sequence.request.name!r} finds no room though nothing runs: "
            f"{counted(book.allocator.num_free, 'page', 'are')} free of "
            f"{book.allocator.num_pages}, others are held by sequences of the engine's cache that "
            "are not its own. Free those, or cancel the request."
        )

    def _left(self, chunks: dict[Sequence, Chunk]) -> int:
        return self.limits.max_step_tokens - sum(c.num_tokens for c in chunks.values())

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        count = min(sequence.num_pending, budget)
        if count <= 0:
            return None
        draft = sequence.draft
        if draft is not None and count == sequence.num_pending == 1:
            room = self.limits.max_length - len(sequence.tokens)
            left = sequence.request.params.max_tokens - sequence.num_output
            draft = draft.cut(min(budget - 1, room), left - 1)
        else:
            draft = None
        return Chunk(sequence, count, draft)

    def _make_room(self, chunk: Chunk, chunks: dict[Sequence, Chunk]) -> bool:
        """Reserve the pages of a chunk, at the cost of later sequences; False if it is the last
        one itself and had to give way."""
        while not self._reserve(chunk):
            if self.prefixes.give_up_one():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            chunks.pop(victim, None)
            if victim is chunk.sequence:
                return False
        return True

    def _reserve(self, chunk: Chunk) -> bool:
        name = chunk.sequence.cached
        assert name is not None
        return self._has_pages(name, chunk.sequence.num_computed + chunk.num_tokens)

    def _has_pages(self, name: int, length: int) -> bool:
        """Reserve the pages of so many tokens of a sequence; False if there are too few."""
        book = self.cache.book
        if book.has_room(name, max(0, length - book.length(name))):  # asked by all in every step
            return True
        try:
            self.cache.reserve(name, length)
        except OutOfPagesError:
            return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        assert victim.cached is not None
        self.prefixes.forget(victim.cached)
        self.running.remove(victim)
        victim.cached, victim.num_computed, victim.draft = None, 0, None
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, chunks: dict[Sequence, Chunk]) -> bool:
        """Let the first of the queue in, if there is room without taking anybody's."""
        sequence, budget = self.waiting[0], self._left(chunks)
        if budget <= 0:
            return False
        shared = self.prefixes.match(sequence.tokens, len(sequence.tokens) - 1)
        if shared is None:
            sequence.cached = self.cache.new()
        else:
            sequence.cached = self.cache.fork(*shared)
        first = not sequence.num_output
        self.computed(sequence, shared[1] if shared else 0)
        chunk = self._chunk(sequence, budget)
        assert chunk is not None
        while not self._reserve(chunk):
            if not self.prefixes.give_up_one():
                self.prefixes.forget(sequence.cached)
                sequence.cached, sequence.num_computed = None, 0
                return False
        if first:
            sequence.num_shared = sequence.num_computed
        self.running.append(self.waiting.popleft())
        chunks[sequence] = chunk
        return True
