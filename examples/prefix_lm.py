"""Prefix-LM: the question is read in both directions, the answer is written from left to right.

A small model learns to write the symbols that occur in a question, each once and sorted. Questions
of a batch differ in length, so that each row has a prefix of its own. The same model, from the same
start and on the same questions, is trained once under a causal mask and once under a prefix mask;
what is printed is the share of answer symbols that each gets right on new questions.

    python examples/prefix_lm.py            200 steps each
    python examples/prefix_lm.py --short    30 steps each

Masks: Raffel et al. 2020 (T5), arXiv:1910.10683, section 3.2.1.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from attnloom import create_block_mask, flex_attention
from attnloom.mods import causal_mask, prefix_lm, relative_bias

SYMBOLS, LEAST, MOST = 12, 8, 20  # of the alphabet; length of a question
START, PAD = SYMBOLS, SYMBOLS + 1
LENGTH = MOST + 1 + SYMBOLS
BATCH, WIDTH, HEADS, LAYERS, REACH = 32, 64, 4, 2, 32


def questions(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [BATCH, LENGTH]: a question, START, its answer, PAD; prefix [BATCH]: up to START;
    targets [BATCH, LENGTH]: the answer where it is to be written, else -100."""
    tokens = torch.full((BATCH, LENGTH), PAD)
    targets = torch.full((BATCH, LENGTH), -100)
    sizes = torch.randint(LEAST, MOST + 1, (BATCH,), generator=generator)
    for row, size in enumerate(sizes.tolist()):
        question = torch.randint(SYMBOLS, (size,), generator=generator)
        answer = question.unique(sorted=True)
        stop = size + 1 + answer.numel()
        tokens[row, :size], tokens[row, size], tokens[row, size + 1 : stop] = (
            question,
            START,
            answer,
        )
        targets[row, size : stop - 1] = answer
    return tokens, sizes + 1, targets


class Model(torch.nn.Module):
    """A decoder that knows positions by a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(PAD + 1, WIDTH)
        layers = range(LAYERS)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in layers)
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4 * WIDTH) for _ in layers)
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in layers)
        self.bias = torch.nn.Parameter(torch.zeros(LAYERS, HEADS, 2 * REACH + 1))
        self.head = torch.nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor, mask_mod) -> Tensor:
        """tokens [B, L] -> logits [B, L, SYMBOLS]."""
        x = self.embed(tokens)
        batch, length = tokens.shape
        block_mask = create_block_mask(mask_mod, batch, None, length, length, BLOCK_SIZE=16)
        for layer in range(LAYERS):
            heads = self.qkv[layer](torch.nn.functional.layer_norm(x, (WIDTH,)))
            q, k, v = heads.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = flex_attention(q, k, v, relative_bias(self.bias[layer]), block_mask)
            x = x + self.out[layer](y.transpose(1, 2).flatten(2))
            inner = self.up[layer](torch.nn.functional.layer_norm(x, (WIDTH,)))
            x = x + self.down[layer](torch.relu(inner))
        return self.head(x)


def learn(steps: int, bidirectional: bool) -> float:
    """Train from a fixed start; the share of right answer symbols on new questions."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        tokens, prefix, targets = questions(generator)
        mask_mod = prefix_lm(prefix) if bidirectional else causal_mask
        logits = model(tokens, mask_mod)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    right = asked = 0
    with torch.no_grad():
        for _ in range(8):
            tokens, prefix, targets = questions(generator)
            mask_mod = prefix_lm(prefix) if bidirectional else causal_mask
            chosen = model(tokens, mask_mod).argmax(-1)
            asked += int((targets >= 0).sum())
            right += int((chosen == targets).sum())
    return right / asked


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Print what each mask learned: its share of right symbols."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="train less")
    args = parser.parse_args(argv)
    steps = 30 if args.short else 200
    shares = {}
    for name, bidirectional in (("causal", False), ("prefix", True)):
        shares[name] = learn(steps, bidirectional)
        print(f"{name} mask: {shares[name]:.1%} of the answer symbols right after {steps} steps")
    return shares


if __name__ == "__main__":
    main()
