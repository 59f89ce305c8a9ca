"""The table of examples that the gallery draws."""

from __future__ import annotations

import pytest
import torch

from attnloom import create_block_mask, flex_attention, mods
from benchmarks.variants import VARIANTS, Variant
from tests.harness.agree import close, normal

# Not variants by themselves: what other examples use.
PARTS = {"TokenOrder", "ancestor_bits", "noop_mask"}


def test_every_mod_has_an_example() -> None:
    shown = {name for variant in VARIANTS for name in variant.names}
    assert set(mods.__all__) - PARTS <= shown
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    for variant in VARIANTS:
        assert f"mods.{variant.names[0]}" in variant.code


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_examples_run(variant: Variant) -> None:
    """At 64 tokens; a mask depends on batch and head exactly as the example says."""
    B, H, S = 2, 4, 64
    score_mod, mask_mod = variant.build(B, H, S)
    assert score_mod is not None or mask_mod is not None
    q_len, kv_len = variant.lengths(S)
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, B, H, q_len, kv_len, BLOCK_SIZE=16)
        lists = block_mask.lists()
        assert (lists.num_batches > 1) == ("b" in variant.mask_axes)
        assert (lists.num_heads > 1) == ("h" in variant.mask_axes)
        assert lists.entries.numel() > 0
    q, k, v = (normal(B, H, n, 8, seed=i) for i, n in enumerate((q_len, kv_len, kv_len)))
    outs = [
        flex_attention(q, k, v, score_mod, block_mask, kernel_options={"backend": backend})
        for backend in ("tiled", "reference")
    ]
    close(*(out.detach() for out in outs))
    if score_mod is not None and variant.name != "head_bias":
        plain = flex_attention(q, k, v, None, block_mask, kernel_options={"backend": "tiled"})
        assert not torch.allclose(outs[0], plain, atol=1e-3)
