"""From logits to tokens, each row by its own request's wishes."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom.serving.request import SamplingParams


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
        return random.Random(f"{self.seed}:{self.place}").random()


class Drawn:
    """Tokens, one a row, that the device may still compute.

    Attributes:
        tokens: [R] int64, where the logits are.
    """

    __slots__ = ("_event", "_host", "tokens")

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self._host = tokens, tokens
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """Wait until they are there. What was started since goes on meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def sample(logits: Tensor, draws: Rows[Draw]) -> Drawn:
    """One token a row, without waiting for the device.

    Args:
        logits: [R, V] float32; may be written over once this returns.
    """
    tokens = logits.argmax(-1)
    random_rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0]
    if random_rows:
        index = torch.tensor(random_rows, device=logits.device)
        tokens[index] = _draw(logits[index], [draws[i] for i in random_rows])
    return Drawn(tokens)


def _draw(logits: Tensor, draws: Rows[Draw]) -> Tensor:
    def column(values: Rows[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(logits.device)[:, None]

    size = logits.size(-1)
    scaled = logits.double() / column([d.params.temperature for d in draws])
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    top_k = column([d.params.top_k or size for d in draws])
    kept = torch.arange(size, device=logits.device) < top_k
    probabilities = probabilities * kept
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    # The token that reaches top_p is kept: what counts is the probability before it.
    before = probabilities.cumsum(-1) - probabilities
    kept = before < column([d.params.top_p for d in draws])
    probabilities = probabilities * kept
    sums = probabilities.cumsum(-1)
    wanted = column([d.uniform() for d in draws]) * sums[:, -1:]
    places = torch.searchsorted(sums, wanted, right=True)
    # Rounding may reach the end of the sums: then the last token that is possible.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return tokens.gather(-1, torch.minimum(places, last))[:, 0]
