"""Tiles of all tables, on every device: they divide the blocks of a mask.

One that is larger than a block has no entry in the lists of its mask. A candidate of 128 rows met
blocks of 64, which the backward makes of short masks, and its programs read lists at address 0.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

import attnloom
from attnloom.backends.triton import configs, configs_backward
from attnloom.backends.triton.configs import Tile
from attnloom.backends.triton.lists import covering, work_lists
from benchmarks.candidates import (
    CANDIDATES,
    PortableBackward,
    PortableForward,
)
from tests.kernels.cross_compile import TARGETS

# The tables have no others, whatever a head dimension is.
WIDTHS = (16, 48, 64, 80, 96, 128, 144, 192, 256, 320, 512)
SIDES = (16, 32, 64, 128, 256)
LENGTHS = (1, 32, 33, 100_000)
NAMES = ("key_tiles", "value_tiles", "row_tiles")
TABLES = [getattr(configs_backward, name) for name in NAMES]


def limits() -> set[tuple[int, int]]:
    """The largest sides of a tile, by length and by block of a mask, if there is one."""
    blocks = (*SIDES, 1 << 30)
    one = {min(covering(length), block) for length in LENGTHS for block in blocks}
    return set(itertools.product(one, repeat=2))


def check(tiles: tuple[Tile, ...], max_m: int, max_n: int) -> None:
    assert tiles
    for tile in tiles:
        assert max_m % tile.tile_m == 0 and max_n % tile.tile_n == 0, (tile, max_m, max_n)


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_of_the_backward_divide_every_block(target: str) -> None:
    device = TARGETS[target][1]
    kinds = itertools.product(WIDTHS, (2, 4, 8), limits(), (False, True), range(3))
    for width, itemsize, (max_m, max_n), adds, work in kinds:
        shape = configs_backward.Shape(width, itemsize, max_m, max_n, adds, work)
        for table in TABLES:
            check(table(device, shape), max_m, max_n)


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_of_the_forward_divide_every_block(target: str) -> None:
    device = TARGETS[target][1]
    kinds = itertools.product(WIDTHS, (2, 4, 8), (False, True), limits(), (1, 1 << 30))
    for width, itemsize, adds, (max_m, max_n), rows in kinds:
        shape = configs.Shape(width, itemsize, adds, max_m, max_n, rows)
        for tiles in (configs.forward_tiles(device, shape), configs.decode_tiles(device, shape)):
            check(tiles, max_m, max_n)


def test_a_tile_larger_than_a_block_reads_no_lists() -> None:
    mask = attnloom.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 300, 300, "cpu", BLOCK_SIZE=64
    )
    with pytest.raises(AssertionError, match="tiles of 128 do not divide blocks of 64"):
        work_lists(mask.lists(), 128)
    assert work_lists(mask.lists(), 32).work.shape == (1, 10, 3)


@pytest.mark.parametrize("sides", [(8, 64), (64, 256), (48, 64), (0, 16)])
def test_a_tile_that_no_kernel_is_proven_for_is_none(sides: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        Tile(*sides, 4, 1)


@pytest.mark.parametrize("block", SIDES)
def test_tiles_of_candidates_are_cut_to_a_block(block: int) -> None:
    device = TARGETS["sm_90"][1]
    for candidate in CANDIDATES:
        width = candidate.cases[0].head_dim
        with candidate.change.installed():
            if isinstance(candidate.change, PortableBackward):
                shape = configs_backward.Shape(width, 2, block, block, False)
                for name in NAMES:
                    check(getattr(configs_backward, name)(device, shape), block, block)
            elif isinstance(candidate.change, PortableForward):
                limits = configs.Shape(width, 2, False, 16, block, 1 << 20)
                check(configs.forward_tiles(device, limits), 16, block)
                check(configs.decode_tiles(device, limits), 16, block)
