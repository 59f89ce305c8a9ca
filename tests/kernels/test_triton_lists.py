"""Which tiles kernels take first, and where their entries lie."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom.backends.triton import lists as lists_module
from attnloom.backends.triton.lists import work_lists

MODS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "by head": lambda b, h, q, kv: (q - kv).abs() < 40 * (h + 1) + b,
    "holes": lambda b, h, q, kv: ((q // 64) != 1) & ((kv // 32) != b) & (q >= kv),
    "empty": lambda b, h, q, kv: q < 0,
}


@pytest.mark.parametrize("bits", [63, 0], ids=["one number", "too many bits"])
@pytest.mark.parametrize("tile_m", [64, 32, 16])
@pytest.mark.parametrize("length", [1, 150, 384])
@pytest.mark.parametrize("mod", MODS)
def test_tiles_with_most_entries_come_first(
    mod: str, length: int, tile_m: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists_module, "_BITS", bits)
    mask = attnloom.create_block_mask(
        MODS[mod], 2, 3, length, length + 70, "cpu", BLOCK_SIZE=(64, 32)
    )
    blocks = mask.lists()
    work = work_lists(blocks, tile_m).work
    units = blocks.num_batches * blocks.num_heads
    offsets = blocks.row_offsets.view(-1).tolist()
    num_q_blocks = -(-length // 64)
    for unit in range(units):
        rows = [unit * num_q_blocks + tile * tile_m // 64 for tile in range(-(-length // tile_m))]
        places = [(tile, offsets[row], offsets[row + 1]) for tile, row in enumerate(rows)]
        places.sort(key=lambda place: place[1] - place[2])  # stable
        assert work[unit].tolist() == [list(place) for place in places]
    assert work.dtype == torch.int32
    assert work.is_contiguous()
