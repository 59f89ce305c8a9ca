"""A small decoder-only transformer; the learned bias is all it knows of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from attnloom.demo.corpus import VOCABULARY, Batch
from attnloom.demo.variant import Variant

# Attend(query, key, value, bias) -> out; tensors [B, H, S, D], bias [H, window_left + 1].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model. width is a multiple of num_heads."""

    num_layers: int = 4
    width: int = 256
    num_heads: int = 4
    variant: Variant = field(default_factory=Variant)


class Layer(nn.Module):
    """Pre-norm attention and a squared-ReLU feed-forward part, both residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        distance = torch.arange(config.variant.window_left + 1)
        slopes = 2.0 ** -torch.linspace(1, 6, config.num_heads)
        self.bias = nn.Parameter(-slopes[:, None] * distance)
        nn.init.zeros_(self.merge.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x: [B, S, width] -> [B, S, width]."""
        rows, length, width = x.shape
        qkv = self.qkv(_normalise(x)).view(rows, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        out = attend(_normalise(query), _normalise(key), value, self.bias)
        x = x + self.merge(out.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.relu(self.widen(_normalise(x))).square())


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.unembed = nn.Linear(config.width, VOCABULARY, bias=False)
        nn.init.zeros_(self.unembed.weight)

    def forward(self, tokens: torch.Tensor, attends: list[Attend]) -> torch.Tensor:
        """tokens [B, S] int64, one attention function a layer -> logits [B, S, VOCABULARY]."""
        x = _normalise(self.embed(tokens))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return self.unembed(_normalise(x))

    def loss(self, batch: Batch, attend: Attend) -> torch.Tensor:
        """Mean nats a byte, over targets that lie in the document of their token."""
        logits = self(batch.tokens, [attend] * len(self.layers))
        losses = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
        )
        return losses[batch.counted.flatten()].mean()


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],))
