"""Tables whose numbers are out of range: page 10^8 crashed the process, page -1 read neighbours."""

from __future__ import annotations

import pytest
import torch

from attnloom import PagedKV, PageTable, ShapeError, create_block_mask, flex_attention, mods

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
