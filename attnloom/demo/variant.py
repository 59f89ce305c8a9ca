"""The attention variant of the demo, written as a user would write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import attnloom


@dataclass(frozen=True, slots=True)
class Variant:
    """Causal attention within a document, over a sliding window, soft-capped, with a learned bias.

    window_left: keys before the query that it may see.
    soft_cap: scores are squeezed into (-soft_cap, soft_cap).
    """

    window_left: int = 256
    soft_cap: float = 30.0

    def mask_mod(self, documents: torch.Tensor):
        """mask_mod over packed rows; documents: [B, S] integer ids."""
        window_left = self.window_left

        def packed_causal_window(b, h, q_idx, kv_idx):
            distance = q_idx - kv_idx
            near = (distance >= 0) & (distance <= window_left)
            return near & (documents[b, q_idx] == documents[b, kv_idx])

        return packed_causal_window

    def score_mod(self, bias: torch.Tensor):
        """score_mod with a learned bias by distance; bias: [Hq, window_left + 1] float."""
        window_left, soft_cap = self.window_left, self.soft_cap

        def biased_and_capped(score, b, h, q_idx, kv_idx):
            distance = (q_idx - kv_idx).clamp(0, window_left)
            return soft_cap * torch.tanh((score + bias[h, distance]) / soft_cap)

        return biased_and_capped

    def decode_mod(self, bias: torch.Tensor, num_keys: int):
        """score_mod for one query whose own key is the last of num_keys cached ones."""
        last, soft_cap = num_keys - 1, self.soft_cap

        def biased_and_capped_decode(score, b, h, q_idx, kv_idx):
            return soft_cap * torch.tanh((score + bias[h, last - kv_idx]) / soft_cap)

        return biased_and_capped_decode

    def block_mask(self, documents: torch.Tensor):
        """BlockMask of one packed batch; documents: [B, S] integer ids."""
        rows, length = documents.shape
        return attnloom.create_block_mask(
            self.mask_mod(documents), rows, None, length, length, device=documents.device
        )
