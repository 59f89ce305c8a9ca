"""debug_bounds over a cache: indices at the positions that sequences have, and no others."""

from __future__ import annotations

import pytest
import torch

from attnloom import PagedKVCache, create_block_mask, flex_attention
from attnloom.api import token_map
from attnloom.errors import ShapeError

H, D = 2, 16
LENGTHS, COUNTS = [20, 0, 37], [3, 0, 5]
CHECKED = {"debug_bounds": True}


def call(score_mod, mask_mod=None, *, batches=None, tensor=False, options=CHECKED):
    """Three sequences, the second without tokens; the newest are queries."""
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, batches, None, 64, 64, BLOCK_SIZE=16)
    query = torch.randn(3, H, max(COUNTS), D)
    if tensor:
        lengths, counts = (torch.tensor(n, dtype=torch.int32) for n in (LENGTHS, COUNTS))
        if mask is None:
            mask = create_block_mask(lambda b, h, i, j: j >= 0, None, None, 64, 64, BLOCK_SIZE=16)
        key = torch.randn(3, H, 64, D)
        mask = mask.for_decode(lengths, counts)
        return flex_attention(query, key, key, score_mod, mask, kernel_options=options)
    cache = PagedKVCache(8, 16, H, D)
    sequences = [cache.new() for _ in LENGTHS]
    cache.extend(sequences, [n - count for n, count in zip(LENGTHS, COUNTS, strict=True)])
    batch = cache.extend(sequences, COUNTS)
    for stored in (*cache.keys, *cache.values):
        stored.normal_()
    return flex_attention(query, batch.layer(), None, score_mod, mask, kernel_options=options)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_query(size):
    table = torch.zeros(size)
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx]


def by_key_of_sequence(size):
    """The table of sequence 2 is read; that of 0 ends where it does."""
    table = torch.zeros(3, size)
    return lambda score, b, h, q_idx, kv_idx: score + table[b, kv_idx]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_positions_are_those_in_the_sequence(tensor, chunk, monkeypatch):
    monkeypatch.setattr(token_map, "MAX_SCORES", chunk)
    call(by_query(37), tensor=tensor)
    with pytest.raises(ShapeError, match=r"with 36 in dimension 0, at b=2, h=0, q_idx=36, kv_i"):
        call(by_query(36), tensor=tensor)
    call(by_key_of_sequence(37), tensor=tensor)
    with pytest.raises(ShapeError, match=r"with 20 in dimension 1, at b=2, h=0, q_idx=32, kv_idx="):
        call(by_key_of_sequence(20), tensor=tensor)


@pytest.mark.parametrize("tensor", [False, True])
def test_what_a_mask_hides_does_not_count(tensor):
    distances = torch.zeros(5)

    def near(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx < 5)

    def by_distance(score, b, h, q_idx, kv_idx):
        return score + distances[q_idx - kv_idx]

    call(by_distance, near, tensor=tensor)
    with pytest.raises(ShapeError, match=r"'distances' of shape \[5\] with 17 .* at b=0"):
        call(by_distance, causal, tensor=tensor)


def test_lists_are_those_of_the_sequence():
    """Sequence 0 keeps what sequence 2 hides."""
    distances = torch.zeros(5)

    def near_in_one(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & ((q_idx - kv_idx < 5) | (b == 0))

    def by_distance(score, b, h, q_idx, kv_idx):
        return score + torch.where(b == 0, 0.0, distances[q_idx - kv_idx])

    call(by_distance, near_in_one, batches=3)
    with pytest.raises(ShapeError, match="at b=2"):
        call(
            by_distance, lambda b, h, i, j: causal(b, h, i, j) & ((i - j < 5) | (b == 2)), batches=3
        )


@pytest.mark.filterwarnings("ignore:mask_mod")
def test_a_mask_is_checked_too():
    kept = torch.arange(30) % 2 == 0

    def some(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & kept[kv_idx]

    with pytest.raises(ShapeError, match=r"'kept' of shape \[30\] with 30 .* at b=2.* kv_idx=30;"):
        call(None, some)


def test_results_are_those_without():
    torch.manual_seed(0)
    want = call(by_query(37), causal, options=None)
    torch.manual_seed(0)
    assert torch.equal(call(by_query(37), causal), want)
