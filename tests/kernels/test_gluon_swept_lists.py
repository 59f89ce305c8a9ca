"""What programs that sweep over a head's keys read, against a loop over the blocks of a mask."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from attnloom import create_block_mask
from attnloom.backends.gluon.configs_backward import STEP
from attnloom.backends.gluon.lists_backward import most_rows, swept_lists
from attnloom.block_mask import BlockLists


def causal(b, h, q, kv):
    return q >= kv


def by_head(b, h, q, kv):
    return (q - kv).abs() < 100 * (h + 1)


def holes(b, h, q, kv):
    return ((q // 256) != 1) & ((kv // 128) != b) & (q >= kv)


def nothing(b, h, q, kv):
    return q < 0 * kv


MODS = [causal, by_head, holes, nothing]


def lists_of(mod, length: int, q_block: int) -> BlockLists:
    block = (q_block, 128)
    return create_block_mask(mod, 2, 2, length, length + 70, "cpu", BLOCK_SIZE=block).lists()


def seen_by(lists: BlockLists) -> list[list[int]]:
    """Key blocks of each row of blocks."""
    edges = lists.row_offsets.tolist()
    return [
        [entry >> 1 for entry in lists.entries[first:last].tolist()]
        for first, last in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("q_block", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 191, 384, 1000])
@pytest.mark.parametrize("mod", MODS)
def test_entries_say_where_sums_begin_and_end(mod, length: int, q_block: int) -> None:
    lists = lists_of(mod, length, q_block)
    grid, rows = lists.grid, seen_by(lists)
    partial = {
        (row, entry >> 1): entry & 1
        for row, entry in zip(lists.entry_rows().tolist(), lists.entries.tolist(), strict=True)
    }
    wanted = [
        block * 8 + (seen[-1] == tile) * 4 + (seen[0] == tile) * 2 + partial[row, tile]
        for unit in range(grid.num_batches * grid.num_heads)
        for tile in range(grid.num_kv_blocks)
        for block in range(grid.num_q_blocks)
        if tile in (seen := rows[row := unit * grid.num_q_blocks + block])
    ]
    assert swept_lists(lists).entries.tolist()[:-1] == wanted


@pytest.mark.parametrize("q_block", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 191, 384, 1000])
@pytest.mark.parametrize("mod", MODS)
def test_no_two_open_rows_share_a_place(mod, length: int, q_block: int) -> None:
    """A row is open from the first tile that adds to it to the last; of steps past the end too."""
    lists = lists_of(mod, length, q_block)
    grid, rows = lists.grid, seen_by(lists)
    window = int(swept_lists(lists).window)
    assert window & (window - 1) == 0 and window <= most_rows(lists)
    for unit in range(grid.num_batches * grid.num_heads):
        first_row = unit * length
        for tile in range(grid.num_kv_blocks):
            used: dict[int, int] = {}
            for block in range(grid.num_q_blocks):
                seen = rows[unit * grid.num_q_blocks + block]
                if len(seen) < 2 or not seen[0] <= tile <= seen[-1]:
                    continue
                for step in range(block * q_block, (block + 1) * q_block, STEP):
                    if step < length:
                        # a step's rows lie together, up to a step's rows behind the window
                        place = (first_row + step) & (window - 1)
                        for other, start in used.items():
                            assert abs(other - place) >= STEP, (step, start)
                        used[place] = step
