"""How many programs share the keys of a row."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from attnloom.backends.triton.splits import num_splits

PROCESSORS = 132


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"),
    [(256, 128, 1), (64, 512, 4), (8, 2048, 33), (512, 128, 1), (1, 2, 1), (1, 3, 1), (1, 64, 32)],
)
def test_one_round_fills_the_device(programs: int, tiles: int, expected: int) -> None:
    assert num_splits(programs, tiles, 2 * PROCESSORS) == expected


@pytest.mark.parametrize("slots", [132, 264, 396, 528])
def test_a_second_round_is_not_free(slots: int) -> None:
    """99 splits of 8 heads in two rounds of 396 were chosen over 49 in one, to save a hundredth of
    the tiles; more splits than programs fit cost 5 to 10% on an H200."""
    splits = num_splits(8, 2048, slots)
    assert 0.9 * slots <= 8 * splits <= slots


@pytest.mark.parametrize("slots", [8, 264])
@pytest.mark.parametrize("programs", [1, 5, 100, 1000])
@pytest.mark.parametrize("tiles", [1, 2, 17, 4096])
def test_every_split_has_work(programs: int, tiles: int, slots: int) -> None:
    splits = num_splits(programs, tiles, slots)
    assert 1 <= splits <= max(1, tiles // 2)
