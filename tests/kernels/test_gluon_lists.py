"""Lists of tiles that hold rows of several blocks of a mask, against a loop over dense blocks."""

from __future__ import annotations

import pytest
import torch

from attnloom import create_block_mask
from attnloom.backends.gluon.configs_forward import ROWS
from attnloom.backends.gluon.merged_lists import FLAG_BITS, merged_lists
from attnloom.block_mask import BlockLists


def dense(lists: BlockLists) -> torch.Tensor:
    """[units, q blocks, kv blocks]: 0 absent, 2 full, 3 partial."""
    grid = lists.grid
    out = torch.zeros(grid.num_rows, grid.num_kv_blocks, dtype=torch.int64)
    out[lists.entry_rows(), (lists.entries >> 1).long()] = 2 + (lists.entries & 1).long()
    return out.view(lists.num_batches * lists.num_heads, grid.num_q_blocks, -1)


def causal(b, h, q, kv):
    return q >= kv


def by_head(b, h, q, kv):
    return (q - kv).abs() < 100 * (h + 1)


def holes(b, h, q, kv):
    return ((q // 256) != 1) & ((kv // 128) != b) & (q >= kv)


@pytest.mark.parametrize("block", [(64, 128), (128, 128), (256, 128), (512, 64)], ids=str)
@pytest.mark.parametrize("length", [1, 191, 384, 1000])
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("mod", [causal, by_head, holes])
def test_every_consumer_sees_its_own_blocks(mod, consumers: int, length: int, block) -> None:
    mask = create_block_mask(mod, 2, 2, length, length + 70, device="cpu", BLOCK_SIZE=block)
    lists = mask.lists()
    blocks = dense(lists)
    entries, work, _ = merged_lists(lists, consumers)
    units, num_tiles, _ = work.shape
    assert sorted(work[0, :, 0].tolist()) == list(range(num_tiles))
    for unit in range(units):
        lengths = work[unit, :, 2] - work[unit, :, 1]
        assert (lengths[1:] <= lengths[:-1]).all(), "tiles with most blocks come first"
        for tile, first, last in work[unit].tolist():
            got = torch.zeros(consumers, blocks.size(2), dtype=torch.int64)
            for entry in entries[first:last].tolist():
                for c in range(consumers):
                    got[c, entry >> FLAG_BITS] = entry >> (2 * c) & 3
            rows = torch.arange(consumers) + tile * consumers
            q_block = rows * ROWS // lists.q_block
            inside = q_block < blocks.size(1)
            want = torch.where(
                inside[:, None], blocks[unit, q_block.clamp(max=blocks.size(1) - 1)], 0
            )
            assert torch.equal(got, want)
            kv = entries[first:last] >> FLAG_BITS
            assert (kv[1:] > kv[:-1]).all(), "keys ascend, each once"
