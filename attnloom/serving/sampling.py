"""From logits to tokens, each row by its own request's wishes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnloom.serving.request import Logprob, SamplingParams

FEW = 1024  # likeliest tokens that are looked for without sorting all
# Temperatures below it draw the likeliest token as it does: divided by it, no two float32 numbers
# are near enough for another, and none overflows float64.
_COLDEST = 1e-200


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token of one row of logits is drawn.

    place: of the token in the output; with the seed it decides the random number, so that a text
        does not depend on what else runs, on preemption or on speculation.
    """

    params: SamplingParams
    seed: int
    place: int

    def uniform(self) -> float:
        """The random number of this token, in [0, 1)."""
        # a digest: `random.Random` of a text takes six times as long, for each token of a step
        digest = hashlib.blake2b(f"{self.seed}:{self.place}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


class Drawn:
    """Tokens, one a row, that the device may still compute.

    Attributes:
        tokens: [R] int64, where the logits are.
    """

    __slots__ = ("_event", "_host", "_scored", "tokens")

    def __init__(self, tokens: Tensor, greatest: Tensor, scored: _Scored | None = None) -> None:
        """Args:
        greatest: [R] of each row of logits.
        """
        self.tokens, self._scored = tokens, scored
        self._event: torch.cuda.Event | None = None
        self._host = (tokens, greatest, *(() if scored is None else scored.tensors))
        if tokens.is_cuda:
            made = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._host]
            for host, there in zip(made, self._host, strict=True):
                host.copy_(there, non_blocking=True)
            self._host = tuple(made)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """Wait until they are there. What was started since goes on meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._host[0].tolist()

    def read_sound(self) -> list[bool]:
        """Of each row whether its token means something: NaN is the greatest of all it is among,
        and of rows of minus infinity nothing is the likeliest. Waits, as `read` does."""
        if self._event is not None:
            self._event.synchronize()
        return [math.isfinite(greatest) for greatest in self._host[1].tolist()]

    def read_logprobs(self) -> list[Logprob | None] | None:
        """Of each row that asks for it; None if none does. Waits, as `read` does."""
        if self._scored is None:
            return None
        tokens = self.read()
        found: list[Logprob | None] = [None] * len(tokens)
        chosen, values, others = (t.tolist() for t in self._host[2:])
        for i, (row, count) in enumerate(self._scored.wanted):
            top = tuple(zip(others[i][:count], values[i][:count], strict=True))
            found[row] = Logprob(tokens[row], chosen[i], top)
        return found


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities of some rows, on their way.

    wanted: (row, number of the likeliest tokens) of each.
    tensors: of the tokens drawn [n], of the likeliest [n, most], and these tokens.
    """

    wanted: list[tuple[int, int]]
    tensors: tuple[Tensor, Tensor, Tensor]


def sample(logits: Tensor, draws: Rows[Draw]) -> Drawn:
    """One token a row, without waiting for the device: one of the V in any case, also where logits
    are not finite.

    Args:
        logits: [R, V] float32; may be written over once this returns.
    """
    tokens = logits.argmax(-1)
    greatest = logits.gather(-1, tokens[:, None])[:, 0]
    wishes = [draw.params for draw in draws]
    # A row of a kind is drawn alike whatever other rows there are, so that its text stays its own.
    kinds: dict[Callable[[Tensor, Rows[Draw]], Tensor], list[int]] = {}
    for i, wish in enumerate(wishes):
        if wish.temperature > 0:
            kinds.setdefault(_kind(wish), []).append(i)
    for draw, rows in kinds.items():
        if len(rows) == len(draws):
            tokens = draw(logits, draws)
        else:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = draw(logits[index], [draws[i] for i in rows])
    return Drawn(tokens, greatest, _score(logits, tokens, wishes))


def _score(logits: Tensor, tokens: Tensor, wishes: Rows[SamplingParams]) -> _Scored | None:
    wanted = [(i, w.logprobs) for i, w in enumerate(wishes) if w.logprobs is not None]
    if not wanted:
        return None
    index = torch.tensor([row for row, _ in wanted], device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    most = min(max(count for _, count in wanted), logits.size(-1))
    values, others = logprobs.topk(most, -1)
    chosen = logprobs.gather(-1, tokens[index][:, None])[:, 0]
    return _Scored(wanted, (chosen, values, others))


class _Columns(NamedTuple):
    """What rows wish, where their logits are: [R, 1] float64 each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def _columns(draws: Rows[Draw], logits: Tensor) -> _Columns:
    """By one copy, from memory that needs no wait for what the device still does."""
    size = logits.size(-1)
    wishes = [d.params for d in draws]
    rows = (
        [max(w.temperature, _COLDEST) for w in wishes],
        [w.top_k or size for w in wishes],
        [w.top_p for w in wishes],
        [d.uniform() for d in draws],
    )
    host = torch.tensor(rows, dtype=torch.float64, pin_memory=logits.is_cuda)
    return _Columns(*host.to(logits.device, non_blocking=True)[..., None].unbind(0))


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    return (logits.double() / temperature).softmax(-1)


def _draw(logits: Tensor, draws: Rows[Draw]) -> Tensor:
    """Any token, [R]."""
    wish = _columns(draws, logits)
    return _pick(_probabilities(logits, wish.temperature), wish.uniform)


def _draw_of_few(logits: Tensor, draws: Rows[Draw]) -> Tensor:
    """One of at most FEW likeliest tokens, [R]: to find them takes a fraction of a sort."""
    return _limited(*logits.topk(min(FEW, logits.size(-1))), draws)


def _draw_ranked(logits: Tensor, draws: Rows[Draw]) -> Tensor:
    """One of the likeliest tokens, [R]."""
    # in float32, which sorts in half the time; no temperature changes the order
    return _limited(*logits.sort(dim=-1, descending=True, stable=True), draws)


def _kind(wish: SamplingParams) -> Callable[[Tensor, Rows[Draw]], Tensor]:
    """How rows that wish so are drawn."""
    if 0 < wish.top_k <= FEW:
        return _draw_of_few
    return _draw_ranked if wish.top_k or wish.top_p < 1 else _draw


def _limited(ordered: Tensor, tokens: Tensor, draws: Rows[Draw]) -> Tensor:
    """Of tokens with falling logits, those that no wish excludes, [R]."""
    wish = _columns(draws, ordered)
    probabilities = _probabilities(ordered, wish.temperature)
    places = torch.arange(ordered.size(-1), device=ordered.device)
    probabilities = probabilities * (places < wish.top_k)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    # The token that reaches top_p is kept: what counts is the probability before it.
    before = probabilities.cumsum(-1) - probabilities
    kept = before < wish.top_p
    return tokens.gather(-1, _pick(probabilities * kept, wish.uniform)[:, None])[:, 0]


def _pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The column at which each row's sum passes its random number, [R]: one that is not 0."""
    sums = probabilities.cumsum(-1)
    total = sums[:, -1:]
    wanted = uniform * total
    # rounding may reach the end of the sums, which nothing passes
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    # NaN, which nothing passes either, would lead behind the last column
    return torch.searchsorted(sums, wanted, right=True)[:, 0].clamp(max=sums.size(-1) - 1)
