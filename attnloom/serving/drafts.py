"""Trees of tokens that may follow a sequence, guessed cheaply and verified by the model."""

from __future__ import annotations

import numbers
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from attnloom.errors import OptionError, counted

_INT64 = "q"


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed continuations that share their beginnings.

    Attributes:
        tokens: of each node.
        parents: of each node, an earlier one; -1 for those that follow the sequence directly.
    Raises:
        OptionError: that is no tree.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            held = tuple(getattr(self, name))  # of a list too, which may change
            if any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in held):
                raise OptionError(f"{name} is {held}; it must be whole numbers.")
            object.__setattr__(self, name, held)
        same = len(self.tokens) == len(self.parents)
        if not same or any(not -1 <= p < i for i, p in enumerate(self.parents)):
            raise OptionError(
                f"parents is {self.parents} for {counted(len(self.tokens), 'token')}; one each: an "
                "earlier node, or -1."
            )

    def depths(self) -> list[int]:
        """1 for those that follow the sequence directly, and so on."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def agreed(self, drawn: Items[int]) -> list[int]:
        """Nodes that agree with the tokens drawn after the sequence itself and after each node, the
        longest path of them. Those tokens are kept, and the first one that no node holds.

        A token is drawn at every node as if there were no drafts, so that the text is what it would
        be without them.
        """
        path: list[int] = []
        node = self.child(-1, drawn[0])
        while node is not None:
            path.append(node)
            node = self.child(node, drawn[1 + node])
        return path

    def child(self, node: int, token: int) -> int | None:
        """The child of a node (-1: of the sequence) that holds a token."""
        for i, (parent, held) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == node and held == token:
                return i
        return None

    def cut(self, num_nodes: int, depth: int) -> DraftTree | None:
        """At most so many nodes, none deeper than that; None if nothing is left."""
        kept: dict[int, int] = {-1: -1}
        tokens, parents = [], []
        for i, d in enumerate(self.depths()):
            if d <= depth and len(tokens) < num_nodes:  # parents come first and are less deep
                kept[i] = len(tokens)
                tokens.append(self.tokens[i])
                parents.append(kept[self.parents[i]])
        return DraftTree(tuple(tokens), tuple(parents)) if tokens else None


class Drafter(Protocol):
    """Guesses what follows. One that raises, or returns what is no tree of the model's tokens, is
    warned of and its guess dropped: the engine goes on without."""

    def propose(self, tokens: Items[int]) -> DraftTree | None:
        """A tree of what may follow these tokens, a tuple; None where there is no idea."""
        ...


class NgramDrafter:
    """What followed the last few tokens where they stood before, each different continuation a
    branch.

    Costs one look through the sequence and needs no second model; helps where text repeats itself:
    code, quotations, summaries.
    """

    def __init__(self, ngram: int = 3, branches: int = 4, depth: int = 5) -> None:
        """Make one.

        Args:
            ngram: tokens that must agree; shorter ones, down to 1, where none do.
            branches: continuations at most, the latest first.
            depth: tokens of each.
        """
        given = (ngram, branches, depth)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in given):
            raise OptionError(
                f"ngram, branches and depth are {ngram!r}, {branches!r} and {depth!r}; each must "
                "be a whole number, 1 or more."
            )
        self.ngram, self.branches, self.depth = ngram, branches, depth

    def propose(self, tokens: Items[int]) -> DraftTree | None:
        """See Drafter."""
        tokens = list(tokens)
        held = array(_INT64, tokens).tobytes()  # to be searched by C
        for n in range(min(self.ngram, len(tokens) - 1), 0, -1):
            paths: dict[tuple[int, ...], None] = {}
            for end in _ends(held, n):
                paths[tuple(tokens[end : end + self.depth])] = None
                if len(paths) == self.branches:
                    break
            if paths:
                return grow(list(paths))
        return None


def _ends(held: bytes, n: int) -> Iterator[int]:
    """Places behind earlier ones of the last n tokens, of 8 bytes each; the latest first."""
    tail = held[-8 * n :]
    at = held.rfind(tail, 0, len(held) - 8)
    while at >= 0:
        if at % 8 == 0:
            yield at // 8 + n
        at = held.rfind(tail, 0, at + len(tail) - 1)


def grow(continuations: Items[Items[int]]) -> DraftTree:
    """The tree of some continuations."""
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for path in map(tuple, continuations):
        for end in range(1, len(path) + 1):
            if path[:end] not in nodes:
                nodes[path[:end]] = len(tokens)
                tokens.append(path[end - 1])
                parents.append(nodes[path[: end - 1]])
    return DraftTree(tuple(tokens), tuple(parents))
