"""Random masks of random sizes: lists, parts and pickles against the dense mask."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from attnloom.api.masks import create_block_mask
from attnloom.masking import classify as classify_module
from attnloom.masking import leaves
from tests.masks.mods import MaskMod, Sizes, dense, drawn
from tests.masks.test_classify import assert_sorted, codes_of, tile_codes


def leaf(draw: random.Random, s: Sizes) -> MaskMod:
    """A mask of one idea, with drawn constants and tables."""
    a, c, m = draw.randint(1, 9), draw.randint(1, 9), draw.randint(2, 40)
    low, high = sorted(draw.randint(-s.longest, s.longest) for _ in range(2))
    g = drawn(draw.randint(0, 10**6))
    ids = torch.randint(0, m, (s.B, s.longest), generator=g)
    steps = (torch.rand(s.longest, generator=g) < 0.1).cumsum(0)
    lengths = torch.randint(0, s.KV + 1, (s.B, s.H), generator=g)
    tiles = torch.rand(s.longest // 16 + 1, s.longest // 16 + 1, generator=g) < 0.4
    values = torch.randn(s.longest, generator=g)
    return draw.choice(
        [
            lambda b, h, q, kv: (q - kv >= low) & (q - kv < high),
            lambda b, h, q, kv: q // m == kv // m,
            lambda b, h, q, kv: q % m >= kv % m,
            lambda b, h, q, kv: ids[b, q] == ids[b, kv],
            lambda b, h, q, kv: steps[q] >= steps[kv] + c,
            lambda b, h, q, kv: kv < lengths[b, h],
            lambda b, h, q, kv: q * a + h >= kv * c + b,
            lambda b, h, q, kv: (q * a + kv * c) % m < 3,
            lambda b, h, q, kv: tiles[q // 16, kv // 16],
            lambda b, h, q, kv: (values[q] - values[kv]).abs() < 0.5 + h,
        ]
    )


def tree(draw: random.Random, s: Sizes, depth: int) -> MaskMod:
    if depth == 0:
        return leaf(draw, s)
    x, y = tree(draw, s, depth - 1), tree(draw, s, depth - 1)
    return draw.choice(
        [
            lambda b, h, q, kv: x(b, h, q, kv) & y(b, h, q, kv),
            lambda b, h, q, kv: x(b, h, q, kv) | y(b, h, q, kv),
            lambda b, h, q, kv: x(b, h, q, kv) & ~y(b, h, q, kv),
            lambda b, h, q, kv: torch.where(q >= s.Q // 2, x(b, h, q, kv), y(b, h, q, kv)),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_masks(seed: int, monkeypatch):
    draw = random.Random(seed)
    s = Sizes(draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 260), draw.randint(1, 260))
    block = (draw.choice([16, 32, 128]), draw.choice([16, 64, 256]))
    monkeypatch.setattr(classify_module, "_START_RECTANGLES", draw.choice([1, 20, 4096]))
    monkeypatch.setattr(leaves, "_SAMPLES", draw.choice([(2, 8, 16), (2,), ()]))
    mod = tree(draw, s, draw.randint(0, 2))
    kept = dense(mod, s)
    mask = create_block_mask(mod, s.B, s.H, s.Q, s.KV, device="cpu", BLOCK_SIZE=block)
    assert_sorted(mask.lists())
    assert torch.equal(codes_of(mask.lists(), s.B, s.H), tile_codes(kept, *block))
    start = draw.randint(0, s.Q)
    stop, kv_len = draw.randint(start, s.Q), draw.randint(0, s.KV)
    part = mask.rows(start, stop).crop(stop - start, kv_len)
    assert torch.equal(part.to_mask(), kept[:, :, start:stop, :kv_len])
    assert torch.equal(pickle.loads(pickle.dumps(part)).to_mask(), part.to_mask())
