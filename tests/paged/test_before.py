"""Without counts, a sequence of fewer tokens than query has rows: the fused kernel gave row i the
place i, others left rows before the first token empty."""

from __future__ import annotations

import pytest
import torch

from attnloom import ShapeError, create_block_mask, flex_attention, mods
from tests.paged.before import SOME, Rows, check_rows, unread

SHORT = (
    "lengths[1] is 2, but without counts all 3 rows of query are the newest of its tokens. Give "
    "counts, which say how many there are of each sequence; further rows are padding."
)
BACKENDS = ["auto", "tiled", "reference", "cpu"]
__all__ = ["unread"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_fewer_tokens_than_rows_of_query_are_refused(page_size: int, backend: str) -> None:
    with pytest.raises(ShapeError) as caught:
        check_rows(Rows((40, 2, 0), 3, page_size, mask="causal"), backend)
    assert str(caught.value) == SHORT


def test_they_are_refused_again_in_calls_that_repeat() -> None:
    key = torch.zeros(2, 1, 64, 8)
    whole = create_block_mask(mods.causal_mask, None, None, 64, 64)
    decode = whole.for_decode(torch.tensor([40, 3]))
    for _ in range(3):
        flex_attention(key[:, :, :3], key, key, block_mask=decode)
    decode.update(torch.tensor([40, 2]))
    with pytest.raises(ShapeError) as caught:
        flex_attention(key[:, :, :3], key, key, block_mask=decode)
    assert str(caught.value) == SHORT


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_without_tokens_has_no_queries(backend: str) -> None:
    check_rows(Rows((40, 0, 3), 3, mask="causal"), backend)
    check_rows(Rows((1, 0), 1, page_size=0), backend)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("problem", SOME, ids=str)
def test_rows_before_the_sequence_are_empty(problem: Rows, backend: str) -> None:
    check_rows(problem, backend)
