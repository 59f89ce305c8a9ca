"""Classification against the dense mask, tile by tile."""

from __future__ import annotations

import pytest
import torch

from attnloom.api.masks import create_block_mask
from attnloom.masking import classify as classify_module
from attnloom.masking import leaves
from attnloom.masking.lists import BlockLists
from tests.masks.mods import (
    MODS,
    MaskMod,
    Sizes,
    dense,
    drawn,
    image_neighbours,
    windows_by_head,
)

SHAPES = [
    (Sizes(1, 1, 1, 1), 16),
    (Sizes(2, 3, 63, 63), 16),
    (Sizes(1, 4, 1000, 1000), (128, 64)),
    (Sizes(2, 1, 129, 511), (16, 256)),
    (Sizes(1, 2, 700, 90), (32, 16)),
    (Sizes(1, 1, 1500, 1300), (1024, 128)),
]


def tile_codes(kept: torch.Tensor, q_block: int, kv_block: int) -> torch.Tensor:
    """0 empty, 1 partial, 2 full for each tile, by real lanes: [B, H, q_blocks, kv_blocks]."""
    B, H, Q, KV = kept.shape
    q_block, kv_block = min(q_block, max(Q, 1)), min(kv_block, max(KV, 1))
    rows, columns = -(-Q // q_block), -(-KV // kv_block)

    def tiles(beyond: bool) -> torch.Tensor:
        wide = torch.full((B, H, rows * q_block, columns * kv_block), beyond)
        wide[:, :, :Q, :KV] = kept
        return wide.view(B, H, rows, q_block, columns, kv_block)

    some = tiles(False).any(5).any(3)
    return some.long() + (some & tiles(True).all(5).all(3)).long()


def codes_of(lists: BlockLists, B: int, H: int) -> torch.Tensor:
    grid = lists.grid
    out = torch.zeros(grid.num_rows, grid.num_kv_blocks, dtype=torch.int64)
    columns = (lists.entries >> 1).long()
    assert (columns < grid.num_kv_blocks).all()
    out[lists.entry_rows(), columns] = 2 - (lists.entries & 1).long()
    shape = (lists.num_batches, lists.num_heads, grid.num_q_blocks, grid.num_kv_blocks)
    return out.view(shape).expand(B, H, -1, -1)


def assert_sorted(lists: BlockLists) -> None:
    keys = lists.entry_rows() * (lists.grid.num_kv_blocks + 1) + (lists.entries >> 1)
    assert (keys.diff() > 0).all()
    assert lists.row_offsets[0] == 0
    assert lists.row_offsets[-1] == lists.entries.numel()
    assert lists.row_offsets.dtype is torch.int64
    assert lists.entries.dtype is torch.int32


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("sizes", "block"), SHAPES, ids=str)
def test_tiles_equal_the_dense_mask(make, sizes: Sizes, block):
    mod = make(sizes)
    mask = create_block_mask(
        mod, sizes.B, sizes.H, sizes.Q, sizes.KV, device="cpu", BLOCK_SIZE=block
    )
    expected = tile_codes(dense(mod, sizes), *mask.BLOCK_SIZE)
    lists = mask.lists()
    assert_sorted(lists)
    assert torch.equal(codes_of(lists, sizes.B, sizes.H), expected)
    assert mask.shape == (sizes.B, sizes.H, sizes.Q, sizes.KV)


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
def test_coarse_levels_and_small_batches_change_nothing(make, monkeypatch):
    monkeypatch.setattr(classify_module, "_START_RECTANGLES", 4)
    monkeypatch.setattr(classify_module, "_BATCH_RECTANGLES", 8)
    monkeypatch.setattr(leaves, "_BATCH_LANES", 100)
    monkeypatch.setattr(leaves, "_BATCH_STRIPS", 40)
    sizes = Sizes(2, 2, 200, 333)
    mod = make(sizes)
    mask = create_block_mask(mod, 2, 2, 200, 333, device="cpu", BLOCK_SIZE=16)
    expected = tile_codes(dense(mod, sizes), 16, 16)
    assert torch.equal(codes_of(mask.lists(), 2, 2), expected)


@pytest.mark.parametrize(
    ("mod", "full", "partial"),
    [
        (lambda b, h, q, kv: q >= kv, 496, 32),
        (lambda b, h, q, kv: (q >= kv) & (q - kv <= 256), 31, 62),
        (lambda b, h, q, kv: q // 512 == kv // 512, 128, 0),
    ],
    ids=["causal", "window", "documents"],
)
def test_known_numbers(mod: MaskMod, full: int, partial: int):
    lists = create_block_mask(mod, None, None, 4096, 4096, device="cpu").lists()
    counted = int((lists.entries & 1).sum())
    assert (lists.entries.numel() - counted, counted) == (full, partial)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(q_len: int, kv_len: int):
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, 2, None, q_len, kv_len, device="cpu")
    assert mask.lists().entries.numel() == 0
    assert mask.shape == (2, 1, q_len, kv_len)
    assert mask.kv_num_blocks.shape == (2, 1, -(-q_len // 128))
    assert mask.sparsity() == 0.0


def test_no_batch_entries_or_heads():
    mask = create_block_mask(lambda b, h, q, kv: q + h + b >= kv, 0, 3, 64, 64, device="cpu")
    assert mask.shape == (0, 3, 64, 64)
    assert mask.kv_num_blocks.shape == (0, 3, 1)


def test_stored_once_where_the_program_does_not_look():
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, 4, 8, 256, 256, device="cpu")
    assert (mask.lists().num_batches, mask.lists().num_heads) == (1, 1)
    assert mask.kv_num_blocks.shape == (4, 8, 2)
    assert mask.kv_indices.stride()[:2] == (0, 0)


def test_stored_once_where_lists_turn_out_equal():
    sizes = Sizes(3, 4, 300, 300)
    shift = torch.zeros(4, dtype=torch.int64)
    start = torch.tensor([0, 0, 200])
    mod = lambda b, h, q, kv: (q >= kv + shift[h]) & (kv >= start[b])
    lists = create_block_mask(mod, 3, 4, 300, 300, device="cpu", BLOCK_SIZE=32).lists()
    assert (lists.num_batches, lists.num_heads) == (3, 1)
    expected = tile_codes(dense(mod, sizes), 32, 32)
    assert torch.equal(codes_of(lists, 3, 4), expected)


def test_without_separate_full_blocks_every_live_tile_is_partial():
    sizes = Sizes(1, 4, 320, 320)
    mod = windows_by_head(sizes)
    make = lambda separate: create_block_mask(
        mod, 1, 4, 320, 320, device="cpu", BLOCK_SIZE=32, separate_full_blocks=separate
    )
    mixed, separate = make(False), make(True)
    assert mixed.full_kv_num_blocks is None
    assert mixed.full_kv_indices is None
    assert mixed.full_q_indices is None
    assert (mixed.lists().entries & 1).all()
    assert torch.equal(mixed.to_dense(), separate.to_dense())


def test_one_block_over_everything():
    """torch's block of 2**30 tokens for a mask that is not used."""
    sizes = Sizes(1, 1, 3000, 2500)
    for mod, code in (
        (lambda b, h, q, kv: q >= 0, 2),
        (lambda b, h, q, kv: q >= kv, 1),
        (lambda b, h, q, kv: (q * 2 == kv) & (q < 0), 0),
        (lambda b, h, q, kv: (q == 2711) & (kv == 1234), 1),
        (lambda b, h, q, kv: (q != 2711) | (kv != 1234), 1),
    ):
        mask = create_block_mask(mod, None, None, 3000, 2500, device="cpu", BLOCK_SIZE=1 << 30)
        assert codes_of(mask.lists(), 1, 1).flatten().tolist() == [code]
        assert tile_codes(dense(mod, sizes), 1 << 30, 1 << 30).flatten().tolist() == [code]


def test_control_flow_is_traced():
    def mod(b, h, q, kv):
        if q < 100:
            return kv < 100
        return q >= kv and kv >= 50

    mask = create_block_mask(mod, None, None, 300, 300, device="cpu", BLOCK_SIZE=16)
    q, kv = torch.arange(300)[:, None], torch.arange(300)
    kept = torch.where(q < 100, kv < 100, (q >= kv) & (kv >= 50))
    assert torch.equal(codes_of(mask.lists(), 1, 1), tile_codes(kept[None, None], 16, 16))


def decided_tiles_only(monkeypatch) -> list[int]:
    """Numbers of tiles that needed all their scores."""
    counts: list[int] = []
    original = leaves._all_scores
    monkeypatch.setattr(
        leaves,
        "_all_scores",
        lambda ranges, tiles: counts.append(len(tiles)) or original(ranges, tiles),
    )
    return counts


def per_document(b, h, q, kv):
    start, first = STARTS[q], STARTS[q]
    return (kv >= start) & (q - first >= kv - first)


STARTS = (torch.rand(4096, generator=drawn(7)) < 0.01).cumsum(0)
STARTS = torch.searchsorted(STARTS, STARTS)
TABLE = torch.rand(32, 16, generator=drawn(8)) < 0.3


@pytest.mark.parametrize(
    "mod",
    [
        image_neighbours(Sizes(1, 1, 4096, 4096)),
        per_document,
        lambda b, h, q, kv: TABLE[q // 128, kv // 256],
        lambda b, h, q, kv: TABLE[q // 128, kv // 256] & (q >= kv),
        lambda b, h, q, kv: (q >= kv) & ((q - kv) % 181 == 0),
    ],
    ids=["image", "positions in documents", "table of tiles", "causal table of tiles", "strided"],
)
def test_few_tiles_need_all_their_scores(mod, monkeypatch):
    """Interval arithmetic over tiles, rows and columns decides the usual masks."""
    evaluated = decided_tiles_only(monkeypatch)
    mask = create_block_mask(mod, None, None, 4096, 4096, device="cpu")
    assert sum(evaluated) == 0
    expected = tile_codes(dense(mod, Sizes(1, 1, 4096, 4096)), 128, 128)
    assert torch.equal(codes_of(mask.lists(), 1, 1), expected)


def test_tables_read_by_a_joint_index(monkeypatch):
    """Out of range and negative indices clamp and wrap in the ranges as they do in kernels."""
    monkeypatch.setattr(classify_module, "_START_RECTANGLES", 4)
    table = torch.tensor([True, False, True, True, False])
    scores = torch.linspace(-1, 1, 9).view(3, 3)
    scores[1, 1] = torch.nan
    for mod in (
        lambda b, h, q, kv: table[(q // 16 - kv // 16).clamp(-5, 4)],
        lambda b, h, q, kv: scores[q // 100, kv // 100] > 0.1,
        lambda b, h, q, kv: scores[q // 100, kv // 100] <= 0.1,
        lambda b, h, q, kv: table[(q * kv) % 5],
    ):
        mask = create_block_mask(mod, None, None, 290, 290, device="cpu", BLOCK_SIZE=16)
        expected = tile_codes(dense(mod, Sizes(1, 1, 290, 290)), 16, 16)
        assert torch.equal(codes_of(mask.lists(), 1, 1), expected)
