"""What benchmarks.serving lets everybody serve, and the least time that it could take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnloom.serving import Decoder
from attnloom.serving.launch import page_bytes

PAGE_SIZE = 128  # torch's masks are made of blocks of 128
_SHORTEST = 16  # the longest prompt and output over the shortest


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, all there at the start.

    Attributes:
        prompts: of different lengths.
        counts: output tokens of each, whatever they are.
        running: sequences that are served at once.
        step_tokens: of a step of our engine, prompts included.
    """

    prompts: list[list[int]]
    counts: list[int]
    running: int
    step_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest output behind it, in whole pages."""
        return -(-(max(map(len, self.prompts)) + max(self.counts)) // PAGE_SIZE) * PAGE_SIZE

    @property
    def num_steps(self) -> int:
        """Decoding steps that are needed at least; a prompt's own gives the first token."""
        left = [count - 1 for count in self.counts]
        return max(*left, -(-sum(left) // self.running))

    def batches(self) -> list[list[int]]:
        """Requests that are served together where a batch begins and ends as one: those with as
        many tokens of output, as if they were known."""
        order = sorted(range(len(self.counts)), key=lambda i: self.counts[i])
        return [order[i : i + self.running] for i in range(0, len(order), self.running)]

    def part(self, requests: list[int]) -> Workload:
        """Some of the requests."""
        prompts = [self.prompts[i] for i in requests]
        counts = [self.counts[i] for i in requests]
        return Workload(prompts, counts, self.running, self.step_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """What a contender did.

    Attributes:
        tokens: output of each request; less than was asked for if time ran out.
        seconds: of all of it. decode_seconds: of what came after each first token, if all requests
            ran at once.
    """

    tokens: list[list[int]]
    seconds: float
    decode_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


# seconds after which a contender stops -> what it did
Run = Callable[[float], Served]
# made ready, graphs and all, which is not timed
Contender = Callable[[Decoder, Workload], Run]


def mixed(
    num: int, longest: tuple[int, int], running: int, step_tokens: int, vocab: int
) -> Workload:
    """Requests of mixed lengths in random order, the same in every run; longest: prompt, output."""
    generator = torch.Generator().manual_seed(0)

    def lengths(most: int) -> list[int]:
        spread = torch.linspace(max(1, most // _SHORTEST), most, num).long()
        return spread[torch.randperm(num, generator=generator)].tolist()

    prompts = [
        torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths(longest[0])
    ]
    return Workload(prompts, lengths(longest[1]), min(running, num), step_tokens)


def together(num: int, longest: int, num_tokens: int, vocab: int) -> Workload:
    """Sequences that decode together: prompts of half the longest and more, in one step."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(max(1, longest // 2), longest, num).long().tolist()
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in spread]
    return Workload(prompts, [num_tokens] * num, num, sum(spread))


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device shows.

    Attributes:
        bytes_s: bytes a second that it reads of a tensor that no cache holds.
        flops_s: operations a second in a product of two large matrices.
    """

    bytes_s: float
    flops_s: float


def decode_bytes(model: Decoder, work: Workload) -> float:
    """What decoding must read at least: all weights but the table of embeddings once a step, and
    the keys and values that each token sees."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tied:
        weights -= model.embed_tokens.weight.numel() * model.embed_tokens.weight.element_size()
    seen = sum(
        (n - 1) * len(p) + n * (n - 1) // 2 for p, n in zip(work.prompts, work.counts, strict=True)
    )
    return work.num_steps * weights + seen * page_bytes(model, 1)


def prompt_flops(model: Decoder, work: Workload) -> float:
    """Operations on prompts: products with weights, the head's for the last token alone, and
    causal attention."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for name, p in model.named_parameters() if name.startswith("layers."))
    lengths = [len(p) for p in work.prompts]
    scores = config.num_layers * config.num_heads * sum(n * (n + 1) // 2 for n in lengths)
    return 2 * layers * sum(lengths) + 2 * head * len(lengths) + 4 * config.head_dim * scores


def least_seconds(model: Decoder, work: Workload, speed: Speed) -> tuple[float, float]:
    """Of all of it, one after the other, and of decoding alone."""
    decoding = decode_bytes(model, work) / speed.bytes_s
    return prompt_flops(model, work) / speed.flops_s + decoding, decoding
