"""Lists of tiles that hold rows, or keys, of several blocks of a mask, against a loop over dense
blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnloom import BlockMask, create_block_mask
from attnloom.backends.gluon.configs_forward import ROWS
from attnloom.backends.gluon.lists_backward import expected_tile_lists, tile_lists
from attnloom.backends.gluon.merged_lists import FLAG_BITS, merged_lists
from attnloom.backends.registry import AttentionCall
from attnloom.block_mask import BlockLists
from attnloom.plan.problem import KernelOptions


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
    found = merged_lists(lists, consumers)
    entries, work = found.entries, found.work
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


TILE, PIECE = 96, 32


def tile_lists_of(mask: BlockMask) -> tuple[Any, ...]:
    lists = mask.lists()
    tensor = torch.empty(1)
    call = AttentionCall(tensor, tensor, tensor, None, None, lists, 1.0, KernelOptions())
    found, expected = tile_lists(call), expected_tile_lists(call)
    assert tile_lists(call)[0] is found[0], "lists are derived once a mask"
    for have, said in zip(found, expected, strict=True):
        assert getattr(have, "dtype", float) == getattr(said, "dtype", float)
    return found


@pytest.mark.parametrize("block", [(64, 128), (128, 128), (512, 256), (64, 512)], ids=str)
@pytest.mark.parametrize("length", [1, 95, 97, 384, 1000])
@pytest.mark.parametrize("mod", [causal, by_head, holes])
def test_pieces_of_96_keys_have_the_states_of_their_blocks(mod, length: int, block) -> None:
    mask = create_block_mask(mod, 2, 2, length + 70, length, device="cpu", BLOCK_SIZE=block)
    blocks = dense(mask.lists())
    bounds, entries, work, *_ = tile_lists_of(mask)
    tiles = -(-length // TILE)
    units = blocks.size(0)
    assert work.shape == (units, tiles, 3) and bounds.shape == (units * tiles, 2)
    for unit in range(units):
        assert sorted(work[unit, :, 0].tolist()) == list(range(tiles))
        lengths = work[unit, :, 2] - work[unit, :, 1]
        assert (lengths[1:] <= lengths[:-1]).all(), "tiles with most blocks come first"
        for tile in range(tiles):
            first, last = bounds[unit * tiles + tile].tolist()
            got = torch.zeros(blocks.size(1), 3, dtype=torch.int64)
            for entry in entries[first:last].tolist():
                for piece in range(3):
                    got[entry >> FLAG_BITS, piece] = entry >> (2 * piece) & 3
            key_block = (tile * TILE + torch.arange(3) * PIECE) // mask.BLOCK_SIZE[1]
            inside = key_block < blocks.size(2)
            want = blocks[unit][:, key_block.clamp(max=blocks.size(2) - 1)]
            assert torch.equal(got, torch.where(inside, want, 0))
            rows = entries[first:last] >> FLAG_BITS
            assert (rows[1:] > rows[:-1]).all(), "queries ascend, each once"


def test_a_mask_without_blocks_has_lists_without_entries() -> None:
    mask = create_block_mask(lambda b, h, q, kv: q < 0, None, None, 300, 300, device="cpu")
    bounds, entries, work, *_ = tile_lists_of(mask)
    assert not (bounds[:, 1] - bounds[:, 0]).any() and work.shape == (1, 4, 3)
    assert entries.numel() == 1
