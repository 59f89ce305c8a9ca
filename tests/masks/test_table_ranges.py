"""Ranges of captured tensors between two indices, and masks that are decided by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnloom import create_block_mask
from attnloom.ir.interval import Interval
from attnloom.ir.node import DType
from attnloom.masking import leaves, table_ranges
from attnloom.masking.table_ranges import SparseTable, element_range
from tests.masks.test_classify import codes_of, tile_codes

S = 300


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_against_every_element(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from([DType.BOOL, DType.I64, DType.F32]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensor = torch.randint(-3, 4, shape, generator=generator).to(dtype.torch)
    if data.draw(st.booleans()):  # few elements a table: they are kept by groups
        limit = 8
    else:
        limit = table_ranges.MAX_ELEMENTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_ranges, "MAX_ELEMENTS", limit)
        table = SparseTable.of(tensor, dtype, dim)
    moved = tensor.movedim(dim, -1)
    size = shape[dim]
    pairs = [(a, b) for a in range(size) for b in range(a, size)]
    first, last = (torch.tensor(ends) for ends in zip(*pairs, strict=True))
    where = [torch.tensor(data.draw(st.integers(0, n - 1))) for n in shape]
    places = [w.expand(len(pairs)) for w in where]
    lo, hi = table.between(places, first, last)
    line = moved[tuple(w for i, w in enumerate(where) if i != dim)]
    for i, (a, b) in enumerate(pairs):
        least, most = line[a : b + 1].min(), line[a : b + 1].max()
        if table.group == 1:
            assert lo[i] == least and hi[i] == most
        assert lo[i] <= least and hi[i] >= most


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (1, 2, (11, 12)),
        (2, 2, (12, 12)),
        (-2, -1, (13, 14)),
        (3, 9, (13, 14)),  # clamped
        (-9, -4, (10, 11)),
        (-1, 1, (10, 14)),  # two signs: anything
    ],
)
def test_negative_indices_and_those_outside(lo, hi, expected):
    tensor = torch.arange(10, 15)
    at = [Interval(torch.tensor([lo]), torch.tensor([hi]), 9)]
    whole = (tensor.min(), tensor.max())
    found = element_range(tensor, DType.I64, at, whole, {})
    assert (int(found[0]), int(found[1])) == expected


near = torch.zeros(S, dtype=torch.bool)
near[:20] = near[[70, 131, 200]] = True
by_head = torch.rand(2, 2 * S, generator=torch.Generator().manual_seed(1)) < 0.02
chosen = torch.rand(S, 10, generator=torch.Generator().manual_seed(2)) < 0.2
limits = torch.randint(0, 200, (S,), generator=torch.Generator().manual_seed(3))
MASKS = {
    "distances": lambda b, h, i, j: (i >= j) & near[(i - j).clamp(min=0)],
    "negative distances": lambda b, h, i, j: near[i - j],
    "by head": lambda b, h, i, j: by_head[h, i - j + S],
    "or columns": lambda b, h, i, j: (i >= j) & (near[j] | near[(i - j).clamp(min=0)]),
    "blocks of each query": lambda b, h, i, j: chosen[i, j // 32],
    "numbers": lambda b, h, i, j: limits[(i - j).abs()] > 100,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [16, (32, 64)])
def test_masks_agree_with_dense_ones(name, block):
    mask = create_block_mask(MASKS[name], None, 2, S, S, BLOCK_SIZE=block)
    at = torch.meshgrid(*(torch.arange(n) for n in (1, 2, S, S)), indexing="ij")
    kept = MASKS[name](*at)
    assert torch.equal(codes_of(mask.lists(), 1, 2), tile_codes(kept, *mask.BLOCK_SIZE))
    assert torch.equal(mask.to_mask(), kept)


@pytest.mark.parametrize("name", ["distances", "by head", "or columns", "blocks of each query"])
def test_a_table_of_distances_is_not_read_score_by_score(name, monkeypatch):
    """Every tile that causality left was evaluated whole: slower than the attention by far."""

    def refuse(*_):
        raise AssertionError("a tile was evaluated score by score")

    monkeypatch.setattr(leaves, "_all_scores", refuse)
    create_block_mask(MASKS[name], None, 2, S, S, BLOCK_SIZE=64)
