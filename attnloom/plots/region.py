"""Which part of a mask a picture shows: a batch entry, some heads, a range of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnloom.block_mask import BlockMask
from attnloom.errors import ShapeError, counted
from attnloom.masking.arguments import read_int, shown

MAX_PANELS = 64
Span = tuple[int, int]
Heads = int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Region:
    """Queries q[0] .. q[1] - 1 and keys kv[0] .. kv[1] - 1 of one batch entry and some heads."""

    batch: int
    heads: tuple[int, ...]
    q: Span
    kv: Span

    @property
    def shape(self) -> tuple[int, int]:
        return self.q[1] - self.q[0], self.kv[1] - self.kv[0]


def read_span(name: str, span: Span | None, length: int) -> Span:
    """A range of tokens, all of them if None; the end is cut to the length.

    Raises:
        ShapeError: it is no pair of ints, or holds no token.
    """
    if span is None:
        span = (0, length)
    if not isinstance(span, (tuple, list)) or len(span) != 2:
        raise ShapeError(f"{name} is {shown(span)}; it must be a pair (first, end) of tokens.")
    first, end = (read_int(name, x) for x in span)
    end = min(end, length)
    if not 0 <= first < end:
        raise ShapeError(
            f"{name} is {tuple(span)} of {counted(length, 'token')}; 0 <= first < end must hold, "
            f"and first < {length}."
        )
    return first, end


def read_heads(heads: Heads, default: int) -> tuple[int, ...]:
    """Heads to draw, one panel each; None draws the first `default`.

    Raises:
        ShapeError: there is none, or more than MAX_PANELS.
    """
    if heads is None:
        chosen: Sequence[int] = range(min(default, MAX_PANELS))
    else:
        chosen = [heads] if isinstance(heads, int) else heads
    found = tuple(read_int("heads", head) for head in chosen)
    if not 1 <= len(found) <= MAX_PANELS or min(found) < 0:
        raise ShapeError(
            f"heads is {shown(heads)}; it must be a head or a list of 1 to {MAX_PANELS} heads, "
            "each 0 or more: every head is a panel."
        )
    return found


def check_tokens(block_mask: BlockMask) -> None:
    """Raises ShapeError for a mask without a single score: there is nothing to draw."""
    if 0 in block_mask.shape:
        raise ShapeError(
            f"the mask has shape {list(block_mask.shape)}, [B, H, Q_LEN, KV_LEN], and so no score "
            "to draw; a picture needs 1 of each or more."
        )


def check_inside(name: str, index: int, size: int) -> int:
    """Where a stored dimension of `size` holds entry `index`; one of size 1 holds every entry.

    Raises:
        ShapeError: it is out of range.
    """
    if size == 1:
        return 0
    if not 0 <= index < size:
        raise ShapeError(f"{name} is {index}; the mask has {size}, counted from 0.")
    return index
