"""Captured tensors that a call outgrows were clamped without a word; now there is a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from attnloom import PagedKVCache, create_block_mask, explain, flex_attention
from attnloom.masking import short_captures
from attnloom.mods import alibi, documents


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    short_captures._warned.clear()


def _inputs(batch: int = 3, heads: int = 4, length: int = 40) -> list[torch.Tensor]:
    return [torch.zeros(batch, heads, length, 16) for _ in range(3)]


def _said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def _reading(load: Any) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + load(b, h, q_idx, kv_idx)

    return score_mod


def test_a_table_of_two_classes_under_three_batch_entries_was_clamped_without_a_word() -> None:
    classes = torch.zeros(2, 40)
    mod = _reading(lambda b, h, q, kv: classes[b, q])
    assert _said(lambda: flex_attention(*_inputs(), mod)) == [
        "score_mod '_reading.score_mod' reads classes[b, ...] of shape [2, 40], but the batch is "
        "3: from b=2 on the index is out of range, where kernels clamp it to 1. Capture a tensor "
        "of 3 along dimension 0, or write b.clamp(max=1) if that is meant."
    ]
    for _ in range(3):
        assert _said(lambda: flex_attention(*_inputs(), mod)) == []  # once
    assert len(_said(lambda: flex_attention(*_inputs(), _other_size()))) == 1


def _other_size() -> Any:
    classes = torch.zeros(1, 2, 20)
    return _reading(lambda b, h, q, kv: classes[0, 0, kv])


@pytest.mark.parametrize(
    ("shape", "load", "words"),
    [
        ((3, 5), lambda t: lambda b, h, q, kv: t[h, 0], "heads are 4: from h=3"),
        ((30,), lambda t: lambda b, h, q, kv: t[q.int()], "Q_LEN is 40: from q_idx=30"),
        ((2, 7), lambda t: lambda b, h, q, kv: t[1, kv], "KV_LEN is 40: from kv_idx=7"),
    ],
)
def test_each_position_is_compared(shape: tuple[int, ...], load: Any, words: str) -> None:
    (said,) = _said(lambda: flex_attention(*_inputs(), _reading(load(torch.zeros(shape)))))
    assert words in said


@pytest.mark.parametrize(
    "load",
    [
        lambda t: lambda b, h, q, kv: t[h % 2],
        lambda t: lambda b, h, q, kv: t[kv.clamp(max=1)],
        lambda t: lambda b, h, q, kv: t[:1][h] + t[None, 0:1][0][b],  # size 1 serves all
        lambda t: lambda b, h, q, kv: torch.zeros(100)[kv],
    ],
)
def test_what_is_in_range_or_not_known_is_not_warned_of(load: Any) -> None:
    assert _said(lambda: flex_attention(*_inputs(), _reading(load(torch.zeros(2))))) == []


def test_documents_that_are_shorter_than_the_mask_were_clamped_without_a_word() -> None:
    ids = torch.arange(277) // 50

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    said = _said(lambda: create_block_mask(mask_mod, None, None, 400, 300))
    assert len(said) == 1  # once for a tensor, though both positions index it
    assert "reads ids[q_idx] of shape [277], but Q_LEN is 400: from q_idx=277" in said[0]
    assert _said(lambda: create_block_mask(mask_mod, 2, None, 277, 277)) == []


def test_a_table_that_a_cache_outgrows_was_clamped_without_a_word() -> None:
    cache = PagedKVCache(8, num_kv_heads=2, head_dim=16, page_size=16)
    cache.append([cache.new()], torch.zeros(1, 2, 60, 16), torch.zeros(1, 2, 60, 16))
    table = torch.zeros(1, 25)
    mod = _reading(lambda b, h, q, kv: table[b, kv])
    (said,) = _said(lambda: flex_attention(torch.zeros(1, 2, 1, 16), cache, score_mod=mod))
    assert "KV_LEN is 60: from kv_idx=25" in said


def test_a_tensor_as_long_as_the_keys_of_a_decode_mask_is_enough() -> None:
    query, key, value = torch.zeros(1, 2, 1, 16), *_inputs(1, 2, 40)[:2]
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64)
    table = torch.zeros(40)
    mod = _reading(lambda b, h, q, kv: table[kv])
    step = mask.for_decode(torch.tensor([40]))
    assert _said(lambda: flex_attention(query, key, value, mod, step)) == []


def test_mods_of_attnloom_do_not_warn() -> None:
    ids = torch.arange(40) // 9

    def call() -> None:
        mask = create_block_mask(documents(ids), None, None, 40, 40)
        flex_attention(*_inputs(), alibi(4), mask)

    assert _said(call) == []


def test_explain_says_it_as_a_note() -> None:
    table = torch.zeros(30)
    mod = _reading(lambda b, h, q, kv: table[q])
    found = []
    assert _said(lambda: found.append(explain(mod, q_len=40, measure=False))) == []
    (note,) = found[0].setting.notes
    assert "Q_LEN is 40: from q_idx=30" in note
