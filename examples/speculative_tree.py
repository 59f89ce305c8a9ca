"""Decode with a tree of guesses: one call checks many drafted tokens, and keeps what is right.

A small byte-level model learns a text for a while. Then it continues a prompt twice. Step by step,
each call gives one byte. With a tree, bigrams of the text draft a tree of likely next bytes; one
call attends from all of them to the cache and to their ancestors in the tree; the longest branch
that the model itself would have written is kept, and its keys and values stay in the cache. Both
write the same bytes; the tree needs fewer calls.

    python examples/speculative_tree.py            600 training steps, 200 bytes
    python examples/speculative_tree.py --short    30 training steps, 40 bytes

Method: Miao et al. 2023 (SpecInfer), arXiv:2305.09781; drafts from bigrams keep the example small.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from attnloom import create_block_mask, flex_attention
from attnloom.mods import causal_lower_right, causal_mask, token_tree

WIDTH, HEADS, LAYERS, BYTES = 64, 4, 2, 128
BRANCHES, DEPTH = (3, 2, 2, 1, 1, 1), 6  # children of a node at each depth
TRAINED_LENGTH = 512


@dataclass(frozen=True)
class Result:
    """The text that both wrote, and the calls that each needed."""

    text: str
    calls_step_by_step: int
    calls_with_trees: int


@dataclass
class Cache:
    """Keys and values [1, HEADS, room, D] of every layer; `length` of them are filled."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    @staticmethod
    def empty(room: int) -> Cache:
        shape = (1, HEADS, room, WIDTH // HEADS)
        keys, values = (
            [torch.zeros(shape, dtype=torch.float64) for _ in range(LAYERS)] for _ in "kv"
        )
        return Cache(keys, values)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values after the filled ones; everything up to their end."""
        stop = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : stop] = key
        self.values[layer][:, :, self.length : stop] = value
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def keep(self, nodes: list[int]) -> None:
        """Of what was written after the filled part, keep these, in this order."""
        at = self.length + torch.tensor(nodes)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[:, :, self.length : self.length + len(nodes)] = tensor[:, :, at]
        self.length += len(nodes)


class Model(torch.nn.Module):
    """A byte-level decoder with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(BYTES, WIDTH)
        torch.nn.init.normal_(self.embed.weight, std=0.05)
        layers = range(LAYERS)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in layers)
        self.out = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4 * WIDTH) for _ in layers)
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in layers)

    def forward(self, tokens: Tensor, position: Tensor, mask_mod, cache: Cache | None = None):
        """tokens and position [L] -> logits [L, BYTES]."""
        x = self.embed(tokens)
        filled = 0 if cache is None else cache.length
        size = tokens.numel()
        block_mask = create_block_mask(mask_mod, None, None, size, filled + size, BLOCK_SIZE=64)
        for layer in range(LAYERS):
            heads = self.qkv[layer](torch.nn.functional.rms_norm(x, (WIDTH,)))
            q, k, v = heads.view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            q, k = _rotate(q, position), _rotate(k, position)
            if cache is not None:
                k, v = cache.write(layer, k, v)
            y = flex_attention(q, k, v, block_mask=block_mask)
            x = x + self.out[layer](y.transpose(1, 2).flatten(2)[0])
            inner = self.up[layer](torch.nn.functional.rms_norm(x, (WIDTH,)))
            x = x + self.down[layer](torch.relu(inner))
        return torch.nn.functional.rms_norm(x, (WIDTH,)) @ self.embed.weight.T


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary position embedding of [1, H, L, D] at positions [L]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 1000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def training_text() -> Tensor:
    """The source of a module of the standard library, as bytes below 128."""
    raw = inspect.getsource(textwrap).encode("ascii", "replace")
    return torch.tensor(list(raw))


def train(model: Model, text: Tensor, steps: int) -> float:
    """Next-byte prediction on pieces of the text; the last loss in nats."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    position = torch.arange(TRAINED_LENGTH)
    loss = torch.zeros(())
    for _ in range(steps):
        start = int(torch.randint(text.numel() - TRAINED_LENGTH, ()))
        piece = text[start : start + TRAINED_LENGTH + 1]
        logits = model(piece[:-1], position, causal_mask)
        loss = torch.nn.functional.cross_entropy(logits, piece[1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return float(loss.detach())


@torch.no_grad()
def step_by_step(model: Model, prompt: Tensor, count: int) -> tuple[list[int], int]:
    """Greedy continuation, one byte a call."""
    cache = Cache.empty(prompt.numel() + count + 1)
    tokens, written, calls = prompt, [], 0
    while len(written) < count:
        stop = cache.length + tokens.numel()
        mask_mod = causal_lower_right(tokens.numel(), stop)
        logits = model(tokens, torch.arange(cache.length, stop), mask_mod, cache)
        cache.length = stop
        calls += 1
        tokens = logits[-1:].argmax(-1)
        written.append(int(tokens))
    return written, calls


@torch.no_grad()
def with_trees(model: Model, prompt: Tensor, count: int, bigrams) -> tuple[list[int], int]:
    """The same bytes. Every call checks the next byte, known already, and a tree of guesses."""
    cache = Cache.empty(prompt.numel() + count + 200)
    size = prompt.numel()
    logits = model(prompt, torch.arange(size), causal_mask, cache)
    cache.length = size
    written, calls = [int(logits[-1].argmax())], 1
    while len(written) < count:
        tokens, parents, depths = draft(written[-1], bigrams)
        mask_mod = token_tree(parents, prefix_length=cache.length)
        position = cache.length + torch.tensor(depths)
        best = model(torch.tensor(tokens), position, mask_mod, cache).argmax(-1).tolist()
        calls += 1
        branch = accepted(tokens, parents, best)
        cache.keep(branch)
        written += [best[node] for node in branch]
    return written[:count], calls


def draft(root: int, bigrams) -> tuple[list[int], list[int], list[int]]:
    """A tree below the byte `root`: bytes, parents and depths of its nodes, parents first."""
    tokens, parents, depths = [root], [-1], [0]
    node = 0
    while node < len(tokens):
        if depths[node] < DEPTH:
            likely = bigrams[tokens[node]].most_common(BRANCHES[depths[node]])
            for token, _ in likely:
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
        node += 1
    return tokens, parents, depths


def accepted(tokens: list[int], parents: list[int], best: list[int]) -> list[int]:
    """The branch that the model would have written: each node is what it chose after its parent."""
    branch = [0]
    while True:
        wanted = best[branch[-1]]
        children = [n for n, parent in enumerate(parents) if parent == branch[-1]]
        right = [n for n in children if tokens[n] == wanted]
        if not right:
            return branch
        branch.append(right[0])


def main(argv: list[str] | None = None) -> Result:
    """Print the text and the calls of both ways."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="train and write less")
    args = parser.parse_args(argv)
    steps, count = (30, 40) if args.short else (600, 200)
    torch.manual_seed(0)
    text = training_text()
    bigrams: dict[int, Counter[int]] = defaultdict(Counter)
    for first, second in zip(text.tolist(), text[1:].tolist(), strict=False):
        bigrams[first][second] += 1
    model = Model()
    print(f"trained on {text.numel()} bytes to {train(model, text, steps):.2f} nats a byte")
    # In float64 the same sums in another order choose the same byte.
    model = model.double()
    prompt = text[9000:9100]
    slow, slow_calls = step_by_step(model, prompt, count)
    fast, fast_calls = with_trees(model, prompt, count, bigrams)
    if slow != fast:
        raise RuntimeError("the tree wrote something else than step-by-step decoding")
    written = bytes(slow).decode("ascii")
    print(f"after {bytes(prompt.tolist()).decode('ascii')!r} it writes\n{written!r}")
    print(f"step by step: {slow_calls} calls; trees of {len(draft(32, bigrams)[0])}: {fast_calls}")
    return Result(written, slow_calls, fast_calls)


if __name__ == "__main__":
    main()
