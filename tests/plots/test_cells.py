"""The data behind the pictures of masks, and their colours."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch

import attnloom
from attnloom.errors import ShapeError
from attnloom.plots import cells, reduced
from attnloom.plots.cells import Kind, colours_of, tile_colours, tile_kinds, token_kinds
from attnloom.plots.colours import PALETTE, lightness, palette_rgb
from attnloom.plots.png import png_bytes
from attnloom.plots.region import Region, read_heads, read_span
from tests.harness.memory import peak_growth


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 40 * (h + 1))


def masked(heads=2, q_len=150, kv_len=200):
    return attnloom.create_block_mask(
        window, None, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=(32, 16)
    )


def test_colours_differ_in_grey():
    """The picture printed in grey says the same: neighbours are 10 of 100 apart, and ordered."""
    light = [lightness(colour) for colour in PALETTE]
    assert all(a - b >= 10 for a, b in itertools.pairwise(light)), light
    assert (light[0], round(lightness("#000000")), round(lightness("#777777"))) == (100, 0, 50)


@pytest.mark.parametrize("head", [0, 1])
def test_tokens_are_those_of_the_mask(head):
    mask = masked()
    region = Region(0, (head,), (10, 140), (5, 190))
    kinds = token_kinds(window, mask, region, head)
    dense = attnloom.create_mask(window, None, 2, 150, 200, device="cpu")[0, head]
    kept = dense[10:140, 5:190].numpy()
    assert (((kinds == Kind.PARTIAL) | (kinds == Kind.FULL)) == kept).all()
    # A tile is full, partial or empty as a whole: whether any and all of its tokens are kept.
    for row in range(0, 150, 32):
        for column in range(0, 192, 16):
            tile = dense[row : row + 32, column : column + 16]
            inside = kinds[max(0, row - 10) : max(0, row + 22), max(0, column - 5) : column + 11]
            wanted = (
                {Kind.FULL} if tile.all() else {Kind.PARTIAL, Kind.DROPPED} if tile.any()
                else {Kind.EMPTY}
            )  # fmt: skip
            assert set(np.unique(inside)) <= wanted


def test_without_tiles_tokens_are_kept_or_masked():
    kinds = token_kinds(window, None, Region(0, (0,), (0, 50), (0, 60)), 0)
    dense = attnloom.create_mask(window, None, None, 50, 60, device="cpu")[0, 0].numpy()
    assert (kinds == np.where(dense, Kind.FULL, Kind.EMPTY)).all()


def test_tiles_are_those_of_the_block_mask():
    mask = masked()
    partial = torch.zeros(2, 5, 13, dtype=torch.bool)
    full = torch.zeros(2, 5, 13, dtype=torch.bool)
    for head in (0, 1):
        for row in range(5):
            n, m = mask.kv_num_blocks[0, head, row], mask.full_kv_num_blocks[0, head, row]
            partial[head, row, mask.kv_indices[0, head, row, :n].long()] = True
            full[head, row, mask.full_kv_indices[0, head, row, :m].long()] = True
        kinds = tile_kinds(mask, Region(0, (head,), (0, 150), (0, 200)), head)
        wanted = np.where(full[head], Kind.FULL, np.where(partial[head], Kind.PARTIAL, Kind.EMPTY))
        assert (kinds == wanted).all()
        part = tile_kinds(mask, Region(0, (head,), (40, 100), (17, 33)), head)
        assert (part == wanted[1:4, 1:3]).all()


def test_large_masks_are_averaged(monkeypatch):
    mask = masked()
    region = Region(0, (1,), (0, 150), (0, 200))
    kinds = tile_kinds(mask, region, 1)
    assert (tile_colours(mask, region, 1) == palette_rgb()[kinds]).all()
    monkeypatch.setattr(cells, "MAX_CELLS", 4)
    coarse = tile_colours(mask, region, 1)
    assert coarse.shape == (3, 4, 3)
    colours = palette_rgb()[kinds]
    np.testing.assert_allclose(coarse[0, 0], colours[:2, :4].mean((0, 1)))
    np.testing.assert_allclose(coarse[2, 3], colours[4:, 12:].mean((0, 1)))
    np.testing.assert_allclose(colours_of(kinds), coarse)


def test_a_million_tokens_are_drawn_from_their_lists():
    long = attnloom.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), None, None, 1 << 20, 1 << 20, device="cpu"
    )
    image = tile_colours(long, Region(0, (0,), (0, 1 << 20), (0, 1 << 20)), 0)
    assert image.shape == (1024, 1024, 3)
    assert (image[0, 5:] == 1).all()
    assert (image.diagonal().T < 1).any(axis=1).all()


def test_too_many_tokens_say_what_to_do():
    with pytest.raises(ShapeError, match=r"8192 x 8192 tokens asks for 67108864 .* plot_block_map"):
        token_kinds(window, None, Region(0, (0,), (0, 8192), (0, 8192)), 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: read_span("q_range", (5, 5), 10), r"q_range is \(5, 5\) of 10 tokens; 0 <= first"),
        (lambda: read_span("q_range", (12, 20), 10), "first < 10"),
        (lambda: read_span("kv_range", 7, 10), r"kv_range is 7; it must be a pair \(first, end\)"),
        (lambda: read_heads([], 1), r"heads is \[\]; it must be a head or a list of 1 to 64"),
        (lambda: read_heads(-1, 1), "heads is -1"),
        (lambda: tile_kinds(masked(), Region(0, (7,), (0, 9), (0, 9)), 7), "head is 7; the mask"),
    ],
)
def test_mistakes(call, text):
    with pytest.raises(ShapeError, match=text):
        call()


def test_spans_end_with_the_tokens():
    assert read_span("q_range", (3, 99), 10) == (3, 10)
    assert read_span("q_range", None, 10) == (0, 10)
    assert (read_heads(None, 3), read_heads(2, 3), read_heads(None, 500)[-1]) == (
        (0, 1, 2), (2,), 63
    )  # fmt: skip


def test_png_files_hold_the_pixels():
    image_module = pytest.importorskip("PIL.Image", reason="needs the extra 'plots'")
    image = np.random.default_rng(0).random((7, 5, 3))
    read = np.asarray(image_module.open(io.BytesIO(png_bytes(image))))
    assert (read == np.round(image * 255)).all()


def _scattered(b, h, q_idx, kv_idx):
    return ((q_idx * 7 + kv_idx * 13) % 5 < 2) & (q_idx - kv_idx <= 150) & (kv_idx != 33)


@pytest.mark.parametrize("in_tiles", [True, False])
@pytest.mark.parametrize(
    "mod",
    [window, _scattered, lambda b, h, q, kv: q < 0],
    ids=["window", "scattered", "nothing"],
)
def test_more_scores_than_can_be_held_are_reduced_tile_by_tile(mod, in_tiles, monkeypatch):
    """The same picture as from all tokens at once; above 2^24 scores that was refused."""
    mask = attnloom.create_block_mask(mod, None, 2, 610, 730, device="cpu", BLOCK_SIZE=(32, 16))
    region = Region(0, (1,), (11, 603), (5, 729))
    for module in (cells, reduced):
        monkeypatch.setattr(module, "MAX_CELLS", 50)
    monkeypatch.setattr(reduced, "_AT_ONCE", 999)
    tiles = mask if in_tiles else None
    whole = reduced.token_colours(mod, tiles, region, 1)
    monkeypatch.setattr(reduced, "MAX_SCORES", 1000)
    monkeypatch.setattr(cells, "mask_tokens", None)  # never dense
    assert np.allclose(reduced.token_colours(mod, tiles, region, 1), whole)


def test_pictures_of_long_masks_are_small():
    mask = attnloom.create_block_mask(window, None, None, 1 << 17, 1 << 17, device="cpu")
    whole = Region(0, (0,), (0, 1 << 17), (0, 1 << 17))
    with peak_growth() as peak:
        image = reduced.token_colours(window, mask, whole, 0)
    assert peak.bytes < 1 << 28
    assert image.shape == (1024, 1024, 3)
    # The diagonal is kept in part, and what is far from it is empty.
    assert (image[0, 1:] == 1).all() and (image[512, 512] < 1).all()


def test_scores_of_partial_tiles_are_bounded(monkeypatch):
    mask = attnloom.create_block_mask(_scattered, None, None, 5000, 5000, device="cpu")
    monkeypatch.setattr(reduced, "MAX_ASKED", 1 << 20)
    with pytest.raises(ShapeError, match=r"scores in partial tiles, more than 1048576\. Zoom in"):
        reduced.token_colours(_scattered, mask, Region(0, (0,), (0, 5000), (0, 5000)), 0)
