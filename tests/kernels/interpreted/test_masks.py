"""Building block lists in kernels, against the torch operators that do the same."""

from __future__ import annotations

import random

import pytest
import torch

from attnloom.backends.triton import mask_lists
from attnloom.masking.lists import TileGrid
from attnloom.trace.tracer import trace_mask
from tests.kernels.mask_building import CPU, RULES, check_lists, grid_of, numbers, repeated
from tests.kernels.mask_programs import check_programs
from tests.masks.mods import MODS, Sizes
from tests.masks.test_fuzz import tree

SMALL = Sizes(1, 2, 30, 90)


def mostly_slow(items, share: int) -> list:
    """Parameters of a test, of which one in `share` runs every time."""
    return [
        pytest.param(x, marks=[pytest.mark.slow] if i % share else []) for i, x in enumerate(items)
    ]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch) -> None:
    """Interpreted programs cost milliseconds each; with few of them loops run more than once."""
    monkeypatch.setattr(mask_lists, "_SETTLERS", 2)
    monkeypatch.setattr(mask_lists, "_LOOK", 16)
    mask_lists._ready.clear()


@pytest.mark.parametrize("name", mostly_slow(RULES, 3))
def test_rules(name: str) -> None:
    check_lists(RULES[name], grid_of(SMALL, 16), CPU)


@pytest.mark.parametrize("make", mostly_slow(MODS, 3), ids=lambda m: m.__name__)
def test_usual_masks(make) -> None:
    s = Sizes(2, 2, 50, 33)
    check_lists(make(s), grid_of(s, (32, 16)), CPU)


@pytest.mark.parametrize("seed", mostly_slow(range(8), 4))
def test_random_masks(seed: int) -> None:
    draw = random.Random(seed)
    s = Sizes(draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 70), draw.randint(1, 70))
    block = (draw.choice([16, 32]), draw.choice([16, 64]))
    check_lists(tree(draw, s, draw.randint(0, 2)), grid_of(s, block), CPU)


def test_random_programs() -> None:
    check_programs(0, 6, CPU)


def test_several_chunks_in_a_row() -> None:
    s = Sizes(1, 1, 40, 16 * 35 - 3)
    check_lists(lambda b, h, q, kv: (q * 9 >= kv) & (kv % 67 != 5), grid_of(s, 16), CPU)


@pytest.mark.parametrize("block", [(16, 1024), (128, 64), (512, 16), 1 << 30], ids=str)
def test_blocks(block) -> None:
    """Larger than a piece, and larger than the lengths."""
    for mod in (RULES["abs"], RULES["where"], lambda b, h, q, kv: (q != 33) | (kv != 71)):
        check_lists(mod, grid_of(Sizes(1, 1, 40, 90), block), CPU)


def test_without_separate_full_blocks() -> None:
    found = check_lists(RULES["sub"], grid_of(SMALL, 16), CPU, separate_full=False)
    assert (found.entries & 1).all()


def test_stored_once_where_lists_are_equal() -> None:
    """By head, by batch entry, by both, by none."""
    same, differs = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 20])
    grid = TileGrid(2, 2, 20, 33, 16, 16)
    for by_b, by_h, kept in (
        (differs, same, (2, 1)),
        (same, differs, (1, 2)),
        (same, same, (1, 1)),
        (differs, differs, (2, 2)),
    ):
        mod = lambda b, h, q, kv, by_b=by_b, by_h=by_h: q + by_h[h] >= kv + by_b[b]
        found = check_lists(mod, grid, CPU)
        assert (found.num_batches, found.num_heads) == kept


def test_numbers_are_arguments() -> None:
    grid = grid_of(SMALL, 16)
    check_lists(numbers(9, 0.37, 2), grid, CPU)
    repeated(lambda width: lambda b, h, q, kv: (q - kv).abs() <= width, grid, CPU)


def test_strided_captures() -> None:
    table = torch.arange(400).view(20, 20) % 7
    mod = lambda b, h, q, kv: table.T[q // 4, kv // 8] < table[::2, 3:][h, q % 3] + 2
    check_lists(mod, grid_of(SMALL, 16), CPU)


@pytest.mark.parametrize(
    "grid",
    [
        TileGrid(1, 1, 0, 50, 16, 16),
        TileGrid(1, 1, 50, 0, 16, 16),
        TileGrid(0, 1, 50, 50, 16, 16),
        TileGrid(1, 1, 5000, 5000, 2048, 128),
        TileGrid(1, 1, 1 << 24, 1 << 24, 128, 128),
    ],
    ids=["no queries", "no keys", "no batch", "large blocks", "many tiles"],
)
def test_left_to_classify(grid: TileGrid) -> None:
    """Nothing to do, blocks that one program would take too long for, tables beyond memory."""
    bound = trace_mask(lambda b, h, q, kv: q + b >= kv, CPU)
    assert mask_lists.build(bound, grid, CPU) is None
