"""Masks of images and videos, and the orders their tokens lie in."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attnloom import flex_attention, mods
from attnloom.api.masks import create_block_mask
from tests.harness.agree import close, normal
from tests.mods.dense import Sizes, check_in_one_kernel, check_mask


def cells(canvas: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Row-major coordinates."""
    return list(itertools.product(*map(range, canvas)))


def square(canvas: tuple[int, ...]) -> Sizes:
    return Sizes(Q=math.prod(canvas), KV=math.prod(canvas))


def line(n: int, kernel: int, dilation: int, causal: bool, i: int) -> list[int]:
    """The keys of query i on one axis: neighbours of its own residue class, counted one by one."""
    mates = [j for j in range(n) if j % dilation == i % dilation]
    at = mates.index(i)
    if causal:
        return mates[: at + 1][-kernel:]
    begin = at - kernel // 2
    while begin < 0:
        begin += 1
    while begin + kernel > len(mates):
        begin -= 1
    return mates[begin : begin + kernel]


def neighbours(places, canvas, kernel, dilation, causal):
    seen = {
        cell: set(itertools.product(*(
            line(*axis) for axis in zip(canvas, kernel, dilation, causal, cell, strict=True)
        )))
        for cell in places
    }  # fmt: skip
    return lambda b, h, q, k: places[k] in seen[places[q]]


GRIDS = [
    ((40,), (7,), (1,), (False,)),
    ((40,), (4,), (3,), (False,)),
    ((41,), (5,), (4,), (True,)),
    ((40,), (1,), (1,), (False,)),
    ((40,), (40,), (1,), (False,)),
    ((6, 7), (3, 5), (1, 1), (False, False)),
    ((6, 9), (3, 4), (2, 1), (False, True)),
    ((7, 5), (2, 5), (3, 1), (True, False)),
    ((3, 4, 5), (3, 3, 3), (1, 1, 1), (False, False, False)),
    ((4, 3, 5), (2, 3, 2), (2, 1, 2), (True, False, False)),
]


@pytest.mark.parametrize(("canvas", "kernel", "dilation", "causal"), GRIDS, ids=str)
def test_neighborhood(canvas, kernel, dilation, causal) -> None:
    mod = mods.neighborhood(canvas, kernel, dilation, causal)
    keeps = neighbours(cells(canvas), canvas, kernel, dilation, causal)
    kept = check_mask(mod, keeps, square(canvas))
    if not any(causal):
        assert (kept.sum(-1) == math.prod(kernel)).all()  # every token sees equally many


def tiled_cells(canvas: tuple[int, ...], tile: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Tile after tile, by loops."""
    corners = itertools.product(*(range(0, n, t) for n, t in zip(canvas, tile, strict=True)))
    return [
        cell
        for corner in corners
        for cell in itertools.product(*(
            range(c, min(c + t, n)) for c, t, n in zip(corner, tile, canvas, strict=True)
        ))
    ]  # fmt: skip


def morton_cells(canvas: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By descent into halves: each cube before the next, the slowest axis deciding first."""

    def descend(corner: tuple[int, ...], side: int) -> list[tuple[int, ...]]:
        if any(c >= n for c, n in zip(corner, canvas, strict=True)):
            return []
        if side == 1:
            return [corner]
        half = side // 2
        found = []
        for step in itertools.product((0, half), repeat=len(canvas)):
            found += descend(tuple(c + s for c, s in zip(corner, step, strict=True)), half)
        return found

    return descend((0,) * len(canvas), 2 ** max(canvas).bit_length())


ORDERS = {
    "tiled line": ((40,), lambda c: mods.tiled_order(c, 7), lambda c: tiled_cells(c, (7,))),
    "tiled image": (
        (6, 7),
        lambda c: mods.tiled_order(c, (4, 2)),
        lambda c: tiled_cells(c, (4, 2)),
    ),
    "tiled video": (
        (3, 4, 5),
        lambda c: mods.tiled_order(c, (2, 3, 2)),
        lambda c: tiled_cells(c, (2, 3, 2)),
    ),
    "morton line": ((40,), mods.morton_order, morton_cells),
    "morton image": ((8, 4), mods.morton_order, morton_cells),
    "morton, odd": ((6, 7), mods.morton_order, morton_cells),
    "morton video": ((3, 4, 5), mods.morton_order, morton_cells),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str) -> None:
    canvas, make, places = ORDERS[name]
    order, expected = make(canvas), places(canvas)
    assert [tuple(x.tolist()) for x in torch.stack(order.coordinates(), 1)] == expected
    tokens = torch.arange(math.prod(canvas))
    assert torch.equal(order.restore(order.permute(tokens, 0), 0), tokens)
    x = torch.randn(2, len(tokens), 3)
    assert torch.equal(order.permute(x)[:, 5], x[:, cells(canvas).index(expected[5])])
    kernel = tuple(min(3, n) for n in canvas)
    ones, never = (1,) * len(canvas), (False,) * len(canvas)
    mod = mods.neighborhood(canvas, kernel, order=order)
    keeps = neighbours(expected, canvas, kernel, ones, never)
    check_mask(mod, keeps, square(canvas))


def test_an_order_changes_nothing_but_places() -> None:
    """Attention over permuted tokens, restored, is attention over row-major tokens."""
    canvas, S = (6, 7), 42
    q, k, v = (normal(1, 2, S, 8, seed=i) for i in range(3))
    plain = create_block_mask(mods.neighborhood(canvas, 3, is_causal=(True, False)), 1, 1, S, S)
    expected = flex_attention(q, k, v, block_mask=plain, kernel_options={"backend": "tiled"})
    for order in (mods.morton_order(canvas), mods.tiled_order(canvas, (4, 4))):
        mod = mods.neighborhood(canvas, 3, is_causal=(True, False), order=order)
        mask = create_block_mask(mod, 1, 1, S, S)
        moved = (order.permute(x) for x in (q, k, v))
        out = flex_attention(*moved, block_mask=mask, kernel_options={"backend": "tiled"})
        close(order.restore(out), expected)


def tile_window(places, canvas, tile, window):
    """Tiles around the nearest tile whose window fits, on each axis."""

    def near(n: int, side: int, wide: int, i: int, j: int) -> bool:
        count = math.ceil(n / side)
        if wide >= count:
            return True
        centres = range(wide // 2, count - wide // 2)
        centre = min(centres, key=lambda c: abs(c - i // side))
        return abs(centre - j // side) <= wide // 2

    def keeps(b, h, q, k):
        axes = zip(canvas, tile, window, places[q], places[k], strict=True)
        return all(near(*axis) for axis in axes)

    return keeps


@pytest.mark.parametrize(
    ("canvas", "tile", "window"),
    [
        ((8, 8), (2, 2), (3, 3)),
        ((7, 10), (2, 4), (3, 1)),
        ((4, 6, 5), (2, 2, 2), (1, 3, 3)),
        ((3, 4, 5), (2, 2, 2), (9, 9, 9)),
    ],
    ids=str,
)
def test_sliding_tile(canvas, tile, window) -> None:
    keeps = tile_window(tiled_cells(canvas, tile), canvas, tile, window)
    check_mask(mods.sliding_tile(canvas, tile, window), keeps, square(canvas))


def test_sliding_tile_in_another_order() -> None:
    canvas, order = (8, 6), mods.morton_order((8, 6))
    keeps = tile_window(morton_cells(canvas), canvas, (2, 3), (3, 1))
    check_mask(mods.sliding_tile(canvas, (2, 3), (3, 1), order), keeps, square(canvas))


def test_sliding_tiles_are_whole_blocks() -> None:
    """The point of the method: no block is partial where a tile of tokens is a block."""
    mask = create_block_mask(
        mods.sliding_tile((16, 16), (4, 4), (3, 3)), 1, 1, 256, 256, BLOCK_SIZE=16
    )
    assert int(mask.full_kv_num_blocks.sum()) == 16 * 9
    assert int(mask.kv_num_blocks.sum()) == 0


def regions(canvas, window, shift):
    """By rolling the image and numbering regions, as the paper's code does."""
    sides = window if isinstance(window, tuple) else (window, window)
    moves = shift if isinstance(shift, tuple) else (shift, shift)
    places = cells(canvas)

    def region(n: int, side: int, move: int, i: int) -> tuple[int, bool]:
        rolled = (i - move) % n
        return rolled // side, i < move  # what was rolled around the border is apart

    def name(token: int) -> list[tuple[int, bool]]:
        return [region(*axis) for axis in zip(canvas, sides, moves, places[token], strict=True)]

    return lambda b, h, q, k: name(q) == name(k)


@pytest.mark.parametrize(
    ("canvas", "window", "shift"),
    [((8, 8), 4, 0), ((8, 8), 4, 2), ((7, 6), (3, 2), (1, 0)), ((6, 6), 6, 3)],
    ids=str,
)
def test_swin_window(canvas, window, shift) -> None:
    keeps = regions(canvas, window, shift)
    check_mask(mods.swin_window(canvas, window, shift), keeps, square(canvas))


def test_in_one_kernel() -> None:
    """Canvases of 60 tokens."""
    image, video = (6, 10), (3, 4, 5)
    dilated = ((3, 4), (2, 1), (False, True))
    ones, never, kernel = (1, 1, 1), (False,) * 3, (3, 3, 3)
    tiled, morton = mods.tiled_order(image, (4, 2)), mods.morton_order(video)
    places, tiles = tiled_cells(image, (4, 2)), tiled_cells(image, (2, 4))
    cases = [
        (mods.neighborhood(image, *dilated), neighbours(cells(image), image, *dilated)),
        (mods.neighborhood(video, 3), neighbours(cells(video), video, kernel, ones, never)),
        (
            mods.neighborhood(image, 3, order=tiled),
            neighbours(places, image, (3, 3), (1, 1), never[:2]),
        ),
        (
            mods.neighborhood(video, 3, order=morton),
            neighbours(morton_cells(video), video, kernel, ones, never),
        ),
        (mods.sliding_tile(image, (2, 4), (3, 1)), tile_window(tiles, image, (2, 4), (3, 1))),
        (mods.swin_window(image, (3, 2), (1, 0)), regions(image, (3, 2), (1, 0))),
    ]
    check_in_one_kernel(cases, square(image))
