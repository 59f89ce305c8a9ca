"""Block lists that somebody chose: a mask_mod may hold where they have no block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attnloom
from attnloom import BlockMask, flex_attention

OPTIONS: Any = {"backend": "triton"}


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "live", "block"),
    [
        (4, 1, 512, torch.eye(4, dtype=torch.bool)[None, :, None, :], 128),
        (1, 128, 128, torch.eye(8, dtype=torch.bool)[None, None], 16),
        (2, 40, 96, torch.eye(3, dtype=torch.bool)[None, None].logical_not(), (16, 32)),
    ],
    ids=["by head in a group", "blocks of few queries", "two heads"],
)
def test_few_queries_see_their_own_blocks(
    heads: int, q_len: int, kv_len: int, live: torch.Tensor, block: Any
) -> None:
    """Rows of blocks that share a program were united, and all of them seen by each."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((1, heads, q_len, 16), (1, 1, kv_len, 16), (1, 1, kv_len, 16))
    x = [torch.randn(size, generator=draw, requires_grad=True) for size in sizes]
    mask = BlockMask.from_block_bool(live, BLOCK_SIZE=block)
    if mask.shape[-2:] != (q_len, kv_len):
        mask = mask.crop(q_len, kv_len)
    out = flex_attention(*x, block_mask=mask, enable_gqa=True, kernel_options=OPTIONS)
    rows, columns = (block, block) if isinstance(block, int) else block
    seen = live[..., torch.arange(q_len) // rows, :][..., torch.arange(kv_len) // columns]
    y = [t.detach().double().requires_grad_() for t in x]
    scores = (y[0] @ y[1].mT / math.sqrt(16)).masked_fill(~seen, -math.inf)
    want = scores.softmax(3) @ y[2]
    dout = torch.randn(out.shape, generator=draw)
    found = (out, *torch.autograd.grad(out, x, dout))
    wanted = (want, *torch.autograd.grad(want, y, dout.double()))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-5


def test_over_a_cache_lists_chosen_by_head_are_refused_where_heads_share_keys() -> None:
    """There they are united as well, and nothing else takes such calls."""
    live = torch.eye(4, dtype=torch.bool)[None, :, None, :].expand(1, 4, 4, 4)
    mask = BlockMask.from_block_bool(live, BLOCK_SIZE=128)
    query, cache = torch.randn(1, 4, 1, 16), torch.randn(1, 1, 512, 16)
    decode = mask.for_decode(torch.tensor([512], dtype=torch.int32))
    with pytest.raises(attnloom.UnsupportedError, match="chosen for each of 4 heads"):
        flex_attention(
            query, cache, cache, block_mask=decode, enable_gqa=True, kernel_options=OPTIONS
        )
