"""Tables of mods where torch's default device is not the CPU."""

from __future__ import annotations

import pytest
import torch

from attnloom import mods
from benchmarks.variants import VARIANTS
from tests.harness.devices import another_default_device


def test_random_blocks_are_drawn_where_their_generator_is() -> None:
    """bigbird drew on the default device by a generator of the CPU, which CUDA refuses."""
    here = mods.bigbird(100, 16, num_heads=2)
    with another_default_device():
        there = mods.bigbird(100, 16, num_heads=2, device="cpu")
        assert mods.bigbird(100, 16)(*torch.zeros(4, 1, dtype=torch.int64)).is_meta
    at = torch.arange(2)[:, None, None], torch.arange(100)[:, None], torch.arange(100)
    assert torch.equal(here(at[0], *at), there(at[0], *at))


@pytest.mark.parametrize("name", ["topk_blocks", "t5_bias", "graphormer_edge", "latent_rope"])
def test_examples_draw_on_the_default_device(name: str) -> None:
    """They had generators of the CPU, so that the gallery could not be measured on a GPU."""
    (variant,) = (v for v in VARIANTS if v.name == name)
    with another_default_device():
        score_mod, mask_mod = variant.build(1, 4, 64)
    assert score_mod is not None or mask_mod is not None
    assert not any("Generator" in v.code for v in VARIANTS)
    first, again = (variant.build(1, 4, 64) for _ in range(2))
    lanes = [torch.tensor(x) for x in (0, 3, 9, 5)]
    for one, other in zip(first, again, strict=True):
        if one is not None and other is not None:
            score = [torch.tensor(0.5)] if one is first[0] else []
            assert torch.equal(one(*score, *lanes), other(*score, *lanes))
