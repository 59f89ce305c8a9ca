"""Sampling with a cache of keys and values, one byte at a time."""

from __future__ import annotations

import torch

import attnloom
from attnloom.demo.model import Attend, Decoder


class Cache:
    """Keys and values of one layer: [1, H, capacity, D] each, `used` tokens filled."""

    def __init__(self, decoder: Decoder, capacity: int):
        config = decoder.config
        shape = (1, config.num_heads, capacity, config.width // config.num_heads)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.used = 0

    def attend(self, decoder: Decoder) -> Attend:
        """Attention of one new token over the cached ones that the window reaches."""
        variant = decoder.config.variant

        def attend(query, key, value, bias):
            self.keys[:, :, self.used] = key[:, :, 0]
            self.values[:, :, self.used] = value[:, :, 0]
            self.used += 1
            first = max(0, self.used - 1 - variant.window_left)
            score_mod = variant.decode_mod(bias, self.used - first)
            keys, values = (t[:, :, first : self.used] for t in (self.keys, self.values))
            return attnloom.flex_attention(query, keys, values, score_mod=score_mod)

        return attend


@torch.no_grad()
def generate(decoder: Decoder, prompt: bytes, num_bytes: int, seed: int, temperature=0.7) -> bytes:
    """Continue a prompt.

    Args:
        prompt: at least one byte.
        num_bytes: bytes to add. temperature: > 0; logits are divided by it.
    Returns:
        The bytes that follow the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    caches = [Cache(decoder, len(prompt) + num_bytes) for _ in decoder.layers]
    attends = [cache.attend(decoder) for cache in caches]
    out = bytearray(prompt)
    for position in range(len(prompt) + num_bytes - 1):
        logits = decoder(torch.tensor([[out[position]]]), attends)[0, -1]
        if position >= len(prompt) - 1:
            chances = torch.softmax(logits / temperature, dim=-1)
            out.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(out[len(prompt) :])
