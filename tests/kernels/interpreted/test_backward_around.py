"""dq from where the Hopper backward adds it up to its tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom.backends.gluon.backward_around import finish_kernel
from attnloom.backends.gluon.fields_backward import AroundConfig
from attnloom.backends.triton.packed import pack_ints

B, HQ, TILE_M = 1, 2, 64


def in_order_of_registers(tile: torch.Tensor) -> torch.Tensor:
    """A tile [TILE_M, WIDTH] as lanes hold its 2 x 2 elements."""
    held = torch.empty(tile.numel())
    for r in range(tile.size(0)):
        for c in range(tile.size(1)):
            lane = r % 8 * 4 + c % 8 // 2
            part = r % 16 // 8 * 2 + c % 2
            held[(c // 8 * 4 + r // 16) * 128 + lane * 4 + part] = tile[r, c]
    return held


@pytest.mark.parametrize(
    ("q_len", "head_dim", "width"), [(128, 64, 64), (70, 48, 64), (100, 128, 128), (65, 192, 192)]
)
def test_dq_is_put_in_order(q_len: int, head_dim: int, width: int) -> None:
    draw = torch.Generator().manual_seed(q_len)
    tiles = -(-q_len // TILE_M)
    sums = torch.randn(B * HQ, tiles * TILE_M, width, generator=draw)
    held = torch.stack([in_order_of_registers(tile) for tile in sums.view(-1, TILE_M, width)])
    dq = torch.full((B, HQ, q_len, head_dim), float("nan"), dtype=torch.float16)
    cfg: Any = AroundConfig(
        TILE_M=TILE_M, CHUNK=64, WIDTH=width, USED=width, COLUMNS=64, D=head_dim, DV=head_dim,
        HAS_DLSE=False, SWEEPS=False, PER_BLOCK=1, OVERLAPS=False, USE_TMA=False, ALIGNED=True,
    )  # fmt: skip
    shape = pack_ints((HQ, q_len, tiles * TILE_M, B * HQ))
    finish_kernel[(B * HQ * tiles * (width // 64),)](held, dq, 0.5, shape, cfg)
    expected = (sums * 0.5)[:, :q_len, :head_dim].to(torch.float16)
    assert torch.equal(dq.flatten(0, 1), expected)
