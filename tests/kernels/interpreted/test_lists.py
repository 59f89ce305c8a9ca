"""Lists derived by kernels, against those that torch's operators derive."""

from __future__ import annotations

import pytest

from attnloom import create_block_mask
from attnloom.backends.triton import list_launches
from attnloom.backends.triton.list_launches import _LANES, _RANKED_LANES
from tests.kernels import list_deriving
from tests.kernels.list_deriving import MODS, lists_of


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_launches, "_runs_here", lambda blocks: True)


@pytest.fixture
def _few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that loops run more than once."""
    monkeypatch.setattr(list_launches, "_LANES", 4)
    monkeypatch.setattr(list_launches, "_RANKED_LANES", 4)


@pytest.mark.parametrize("length", [1, 191, pytest.param(700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mod", MODS)
def test_lists_are_those_of_sorting(mod: str, length: int, _few_lanes) -> None:
    assert (list_launches._LANES, list_launches._RANKED_LANES) != (_LANES, _RANKED_LANES)
    for q_block in (64, 128) if length > 1 else (128,):
        blocks = lists_of(mod, length, (q_block, 128), "cpu")
        list_deriving.check_work(blocks, 64)
        if blocks.entries.numel():
            list_deriving.check_transposed(blocks)
            list_deriving.check_swept(blocks)
            list_deriving.check_merged(blocks, 3)
            list_deriving.check_merged(blocks, 3, 32, turned=True)


@pytest.mark.parametrize("block", [(256, 64), (64, 64)], ids=str)
def test_in_one_step(block: tuple[int, int]) -> None:
    blocks = lists_of("holes", 300, block, "cpu")
    list_deriving.check_work(blocks, 32)
    list_deriving.check_transposed(blocks)
    list_deriving.check_swept(blocks)
    for consumers in (2, 3):
        list_deriving.check_merged(blocks, consumers)


def test_a_tile_past_the_last_block() -> None:
    """Tiles of 96 keys cover 1,056 of 1,000, blocks 1,024."""
    mask = create_block_mask(MODS["holes"], 2, 3, 100, 1000, "cpu", BLOCK_SIZE=(64, 128))
    list_deriving.check_merged(mask.lists(), 3, 32, turned=True)
