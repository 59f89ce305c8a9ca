"""Read one long prompt once for many continuations, packed into a single row.

Sixteen answers to one question, as when several are scored or compared: usually each is a row of
its own, with the prompt repeated in front. Here they lie behind one prompt in one row, each seeing
the prompt and itself. A small transformer with rotary positions gives the same for every answer
token, from a fraction of the tokens.

    python examples/shared_prefix.py            prompt of 1,500 tokens, 16 answers of 20 to 120
    python examples/shared_prefix.py --short    prompt of 200 tokens, 5 answers of 5 to 30

Method: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom import BlockMask, create_block_mask, flex_attention
from attnloom.mods import causal_mask, shared_prefix

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 2, 500


@dataclass(frozen=True)
class Result:
    """farthest: the largest difference of a logit between both ways."""

    packed_tokens: int
    separate_tokens: int
    packed_seconds: float
    separate_seconds: float
    farthest: float


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of [B, H, L, D] at positions [L]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1
    )


class Transformer(torch.nn.Module):
    """A decoder with random weights; attention takes a BlockMask and a position for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, position: Tensor, block_mask: BlockMask) -> Tensor:
        """tokens [L] -> logits [L, VOCABULARY]."""
        x = self.embed(tokens)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            heads = qkv(torch.nn.functional.rms_norm(x, (WIDTH,)))
            q, k, v = heads.view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            y = flex_attention(rotate(q, position), rotate(k, position), v, block_mask=block_mask)
            x = x + out(y.transpose(1, 2).flatten(2)[0])
            x = x + down(torch.relu(up(torch.nn.functional.rms_norm(x, (WIDTH,)))))
        return x @ self.embed.weight.T


def packed(model: Transformer, prompt: Tensor, answers: list[Tensor]) -> list[Tensor]:
    """Logits of each answer's tokens, from one row."""
    lengths = torch.tensor([0] + [answer.numel() for answer in answers])
    cu_seqlens = lengths.cumsum(0)
    tokens = torch.cat([prompt, *answers])
    inside = torch.cat([torch.arange(answer.numel()) for answer in answers])
    position = torch.cat([torch.arange(prompt.numel()), prompt.numel() + inside])
    size = tokens.numel()
    mask_mod = shared_prefix(prompt.numel(), cu_seqlens)
    block_mask = create_block_mask(mask_mod, None, None, size, size)
    logits = model(tokens, position, block_mask)[prompt.numel() :]
    return list(logits.split(lengths[1:].tolist()))


def separate(model: Transformer, prompt: Tensor, answers: list[Tensor]) -> list[Tensor]:
    """The same, each answer behind a prompt of its own."""
    out = []
    for answer in answers:
        tokens = torch.cat([prompt, answer])
        size = tokens.numel()
        block_mask = create_block_mask(causal_mask, None, None, size, size)
        out.append(model(tokens, torch.arange(size), block_mask)[prompt.numel() :])
    return out


def main(argv: list[str] | None = None) -> Result:
    """Print tokens and times of both ways."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a short prompt, few answers")
    args = parser.parse_args(argv)
    prompt_length, count, least, most = (200, 5, 5, 30) if args.short else (1500, 16, 20, 120)
    torch.manual_seed(0)
    model = Transformer()
    prompt = torch.randint(VOCABULARY, (prompt_length,))
    sizes = torch.randint(least, most + 1, (count,)).tolist()
    answers = [torch.randint(VOCABULARY, (size,)) for size in sizes]
    packed_seconds, ours = _timed(lambda: packed(model, prompt, answers))
    separate_seconds, theirs = _timed(lambda: separate(model, prompt, answers))
    farthest = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    result = Result(
        prompt_length + sum(sizes),
        prompt_length * count + sum(sizes),
        packed_seconds,
        separate_seconds,
        farthest,
    )
    print(f"a prompt of {prompt_length} tokens and {count} answers of {least} to {most}")
    print(f"one row:       {result.packed_tokens:>6} tokens, {packed_seconds:.3f} s")
    print(f"separate rows: {result.separate_tokens:>6} tokens, {separate_seconds:.3f} s")
    print(f"the farthest logit differs by {farthest:.1e}")
    return result


@torch.no_grad()
def _timed(run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    run()  # compiles
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


if __name__ == "__main__":
    main()
