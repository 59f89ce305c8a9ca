"""A step of the model that is under way, and what comes of it once the device is done."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from attnloom.serving.request import Logprob
from attnloom.serving.runner import StepLogits
from attnloom.serving.sampling import Draw, Drawn, sample
from attnloom.serving.scheduler import Chunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows:
    """What was drawn after the last token of a chunk and after each of its drafts.

    Attributes:
        sound: of each token whether its logits mean something.
    """

    tokens: list[int]
    sound: list[bool]
    logprobs: list[Logprob | None] | None

    def at(self, kept: Iterable[int]) -> Rows:
        """Some of them."""
        found = self.logprobs
        return Rows(
            [self.tokens[row] for row in kept],
            [self.sound[row] for row in kept],
            None if found is None else [found[row] for row in kept],
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device computes; counts: rows drawn of each chunk."""

    chunks: list[Chunk]
    counts: tuple[int, ...]
    drawn: Drawn | None

    @classmethod
    def of(cls, chunks: list[Chunk], logits: StepLogits, ahead: int) -> Launched:
        """Draw after the chunks of a step; ahead: tokens that the sequences have but do not know
        yet."""
        draws = [draw for chunk in chunks if chunk.ends for draw in _draws(chunk, ahead)]
        return cls(chunks, logits.counts, sample(logits.rows, draws) if draws else None)

    @property
    def alive(self) -> bool:
        """Whether anybody waits for it: sequences may have ended since it was started."""
        return any(chunk.sequence.finish is None for chunk in self.chunks)

    def rows(self) -> list[Rows]:
        """Those of each chunk, once they are there."""
        drawn = self.drawn
        if drawn is None:
            return [Rows([], [], None) for _ in self.chunks]
        tokens, sound = self._by_chunk(drawn.read()), self._by_chunk(drawn.read_sound())
        found = drawn.read_logprobs()
        scored = itertools.repeat(None) if found is None else self._by_chunk(found)
        return [Rows(*each) for each in zip(tokens, sound, scored, strict=False)]

    def _by_chunk(self, rows: Iterable[T]) -> list[list[T]]:
        left = iter(rows)
        return [list(itertools.islice(left, count)) for count in self.counts]


def _draws(chunk: Chunk, ahead: int) -> list[Draw]:
    """How to draw after the last token of a chunk and after each of its drafts."""
    sequence, depths = chunk.sequence, chunk.draft.depths() if chunk.draft else []
    params, place = sequence.request.params, sequence.num_output + ahead
    return [Draw(params, sequence.seed, place + depth) for depth in (0, *depths)]
