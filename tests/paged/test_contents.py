"""Tables whose numbers are out of range: page 10^8 crashed the process, page -1 read neighbours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from attnloom import (
    PagedBatch,
    PagedKV,
    PagedKVCache,
    PageTable,
    ShapeError,
    create_block_mask,
    flex_attention,
    mods,
)
from attnloom.paged import table as table_module

NUM_PAGES, PAGE = 5, 16


def attend(
    lengths: list[int],
    pages: list[list[int]],
    counts: list[int] | None = None,
    q_len: int = 1,
    max_length: int = 32,
) -> torch.Tensor:
    def ints(x: object) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32)

    storage = torch.randn(NUM_PAGES, 1, PAGE, 8, generator=torch.Generator().manual_seed(0))
    given = None if counts is None else ints(counts)
    table = PageTable(ints(lengths), given, ints(pages), PAGE, max_length)
    return flex_attention(torch.ones(len(lengths), 1, q_len, 8), PagedKV(storage, storage, table))


WRONG = {
    "a page far away": ({"lengths": [20], "pages": [[4, 10**8]]}, "pages[0, 1] is 100000000, but"),
    "one page too far": ({"lengths": [20], "pages": [[4, 5]]}, "key has 5 pages, 0 to 4"),
    "a negative page": ({"lengths": [1, 20], "pages": [[0, 0], [-1, 0]]}, "tokens 0 to 15 of seq"),
    "the last tokens": ({"lengths": [20], "pages": [[0, -3]]}, "tokens 16 to 19 of sequence 0"),
    "too long": ({"lengths": [3, 33], "pages": [[0, 1], [2, 3]]}, "lengths[1] is 33; it must be 0"),
    "below zero": ({"lengths": [-1], "pages": [[0, 1]]}, "lengths[0] is -1; it must be 0 to 32"),
    "counts beyond query": (
        {"lengths": [9], "pages": [[0, 1]], "counts": [2]}, "counts[0] is 2; it must be 0 to 1",
    ),
    "counts beyond tokens": (
        {"lengths": [9, 1], "pages": [[0, 1], [2, 3]], "counts": [2, 2], "q_len": 2},
        "counts[1] is 2; it must be 0 to 1 (its length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    arguments, text = WRONG[name]
    with pytest.raises(ShapeError) as caught:
        attend(**arguments)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_entries_past_the_end_of_a_sequence_may_hold_anything() -> None:
    torch.testing.assert_close(attend([16], [[4, 10**8]]), attend([16], [[4, 0]]))
    assert attend([0], [[-1, -1]]).eq(0).all()


def test_a_cache_advanced_past_its_end_is_refused() -> None:
    key = torch.zeros(1, 1, 32, 8)
    mask = create_block_mask(mods.causal_mask, None, None, 32, 32)
    decode = mask.for_decode(torch.tensor([32]))
    flex_attention(torch.zeros(1, 1, 1, 8), key, key, block_mask=decode)
    decode.advance()
    with pytest.raises(ShapeError, match=r"lengths\[0\] is 33"):
        flex_attention(torch.zeros(1, 1, 1, 8), key, key, block_mask=decode)


def batch_of_a_cache() -> PagedBatch:
    cache = PagedKVCache(NUM_PAGES, PAGE, 1, 8)
    return cache.append([cache.new() for _ in range(2)], *torch.zeros(2, 2, 1, 20, 8))


CHANGES: dict[str, tuple[Callable[[PagedBatch], object], str]] = {
    "length": (lambda batch: batch.table.lengths.add_(1), "lengths[0] is 21; it must be 0 to 20"),
    "count": (lambda batch: batch.table.counts.fill_(2), "counts[0] is 2; it must be 0 to 1"),  # type: ignore[union-attr]
    "page": (lambda batch: batch.table.pages[1].fill_(-1), "pages[1, 0] is -1, but key has 7 page"),  # type: ignore[index]
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_table_of_a_cache_is_asked_again_once_it_changed(name: str, inference: bool) -> None:
    """It is not asked in each call; what is written into it by hand is refused all the same."""
    change, text = CHANGES[name]
    batch = batch_of_a_cache()
    batch.update(batch.sequences, [1, 1])
    query = torch.zeros(2, 1, 1, 8)
    with torch.inference_mode(inference):
        flex_attention(query, batch.layer())
        change(batch)
        with pytest.raises(ShapeError) as caught:
            flex_attention(query, batch.layer())
    assert text in str(caught.value)


def test_a_table_of_a_cache_is_not_asked_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking took a sixth of the smallest call, or more."""
    asked = []
    check = table_module._check_numbers

    def counting(*arguments: object) -> None:
        asked.append(arguments)
        check(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(table_module, "_check_numbers", counting)
    batch = batch_of_a_cache()
    for _ in range(3):
        flex_attention(torch.zeros(2, 1, 20, 8), batch.layer())
    assert len(asked) == 1
    batch.update(batch.sequences, [1, 1])
    flex_attention(torch.zeros(2, 1, 20, 8), batch.layer())
    assert len(asked) == 2
    with pytest.raises(ShapeError, match="has 3 pages, 0 to 2;"):
        kv = batch.layer()
        flex_attention(torch.zeros(2, 1, 20, 8), PagedKV(kv.key[:3], kv.value[:3], kv.table))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_of_a_table_is_asked_each_time(copied: Callable[[PageTable], PageTable]) -> None:
    with torch.inference_mode():
        batch = batch_of_a_cache()
        kv = batch.layer()
        query = torch.zeros(2, 1, 20, 8)
        flex_attention(query, kv)
        table = copied(kv.table)
        flex_attention(query, PagedKV(kv.key, kv.value, table))
        assert table.pages is not None
        table.pages.numpy()[0, 0] = 99  # which torch does not see
        with pytest.raises(ShapeError, match=r"pages\[0, 0\] is 99"):
            flex_attention(query, PagedKV(kv.key, kv.value, table))
