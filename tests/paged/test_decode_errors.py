"""Users' mistakes with a cache that is one tensor; texts are pinned."""

from __future__ import annotations

import pytest
import torch

from attnloom import DecodeMask, create_block_mask, flex_attention, mods
from attnloom.errors import DtypeError, ModError, OptionError, ShapeError
from attnloom.masking.decode import _narrowed
from tests.harness.pinned import Pinned, assert_says


def decode(*lengths: int) -> DecodeMask:
    mask = create_block_mask(mods.causal_mask, None, None, 32, 32)
    return mask.for_decode(torch.tensor(lengths, dtype=torch.int32))


def with_lengths(lengths: object, counts: object = None) -> DecodeMask:
    return decode(1).mask.for_decode(lengths, counts)


def attend(made: DecodeMask, keys: int = 32) -> torch.Tensor:
    key = torch.zeros(made.lengths.numel(), 1, keys, 8)
    return flex_attention(key[:, :, :1], key, key, block_mask=made)


def attend_with_two_rows(made: DecodeMask) -> torch.Tensor:
    key = torch.zeros(made.lengths.numel(), 1, 32, 8)
    return flex_attention(key[:, :, :2], key, key, block_mask=made)


def advanced_past_the_end() -> torch.Tensor:
    made = decode(5, 32)
    made.advance()
    return attend(made)


INTEGERS = "it must hold integers, the tokens of each sequence, the queries included. Use .int()."
BEYOND = ", which does not fit the 32 bits that kernels count tokens in. Correct it:"
ERRORS: dict[str, Pinned] = {
    "a list": (
        lambda: with_lengths([1, 2]),
        OptionError,
        "lengths is [1, 2]; it must be a torch.Tensor.",
    ),
    "floats": (
        lambda: with_lengths(torch.ones(2)),
        DtypeError,
        f"lengths is torch.float32; {INTEGERS}",
    ),
    "truths": (
        lambda: with_lengths(torch.ones(2) > 0),
        DtypeError,
        f"lengths is torch.bool; {INTEGERS}",
    ),
    "complex numbers": (
        lambda: with_lengths(torch.ones(2) * 1j),
        DtypeError,
        f"lengths is torch.complex64; {INTEGERS}",
    ),
    "one number": (
        lambda: with_lengths(torch.tensor(5)),
        ShapeError,
        "lengths is []; it must be [B], the tokens of each sequence, the queries included.",
    ),
    "a list of counts": (
        lambda: with_lengths(torch.tensor([5]), [1]),
        OptionError,
        "counts is [1]; it must be a torch.Tensor.",
    ),
    "counts of halves": (
        lambda: with_lengths(torch.tensor([5]), torch.tensor([0.5])),
        DtypeError,
        "counts is torch.float32; it must hold integers, the queries of each sequence. Use .int().",
    ),
    "one count": (
        lambda: with_lengths(torch.tensor([5]), torch.tensor(1)),
        ShapeError,
        "counts is []; it must be [B], the queries of each sequence.",
    ),
    "more counts": (
        lambda: with_lengths(torch.tensor([5]), torch.ones(2).int()),
        ShapeError,
        "counts is [2], lengths [1]; they must be [B] and [B].",
    ),
    "half a token": (
        lambda: decode(5).advance(0.5),  # type: ignore[arg-type]
        ShapeError,
        "count is 0.5; it must be an int.",
    ),
    "backwards": (
        lambda: decode(5).advance(-1),
        ShapeError,
        "count is -1; advance lets every sequence grow, by 0 tokens or more. To take tokens back, "
        "or for a number of its own for each, give `update` the lengths.",
    ),
    "all tokens in place of the new ones": (
        lambda: decode(5).advance((1 << 32) + 1),
        ShapeError,
        "count is 4294967297, but the mask was built for sequences of up to 32 tokens. advance "
        "takes the tokens that are new, not all that there are; for those give `update` the "
        "lengths.",
    ),
    "a length beyond 32 bits": (
        lambda: with_lengths(torch.tensor([5, (1 << 32) + 6])),
        ShapeError,
        f"lengths[1] is 4294967302{BEYOND} lengths are those of one sequence each.",
    ),
    "a length far below zero": (
        lambda: with_lengths(torch.tensor([-(1 << 32) + 6])),
        ShapeError,
        f"lengths[0] is -4294967290{BEYOND} lengths are those of one sequence each.",
    ),
    "a length of unsigned numbers": (
        lambda: with_lengths(torch.tensor([1 << 31]).to(torch.uint32)),
        ShapeError,
        f"lengths[0] is 2147483648{BEYOND} lengths are those of one sequence each.",
    ),
    "a count beyond 32 bits": (
        lambda: with_lengths(torch.tensor([5]), torch.tensor([(1 << 32) + 1])),
        ShapeError,
        f"counts[0] is 4294967297{BEYOND} counts are those of one sequence each.",
    ),
    "an update beyond 32 bits": (
        lambda: decode(5).update(torch.tensor([(1 << 32) + 6])),
        ShapeError,
        f"lengths[0] is 4294967302{BEYOND} lengths are those of one sequence each.",
    ),
    "fewer tokens than queries": (
        lambda: attend_with_two_rows(decode(5, 1)),
        ShapeError,
        "lengths[1] is 1, but without counts all 2 rows of query are the newest of its tokens. "
        "Give counts, which say how many there are of each sequence; further rows are padding.",
    ),
    "one update for all": (
        lambda: decode(5, 6).update(torch.tensor([7])),
        ShapeError,
        "lengths is [1]; this mask was made for 2 sequences, one length each. Call for_decode "
        "again for another batch.",
    ),
    "update by floats": (
        lambda: decode(5).update(torch.tensor([5.5])),
        DtypeError,
        f"lengths is torch.float32; {INTEGERS}",
    ),
    "past the end": (
        advanced_past_the_end,
        ShapeError,
        "lengths[1] is 33; it must be 0 to 32 (the tokens that the mask was built for). Kernels "
        "read the table as it is when they run: correct it, or call for_decode on a mask of longer "
        "sequences.",
    ),
    "past the end of the keys": (
        lambda: attend(decode(5, 24), keys=20),
        ShapeError,
        "lengths[1] is 24; it must be 0 to 20 (the tokens that key has room for). Kernels read the "
        "table as it is when they run: correct it, or give a longer key and value.",
    ),
    "more queries than tokens": (
        lambda: attend(with_lengths(torch.tensor([0]), torch.ones(1).int())),
        ShapeError,
        "counts[0] is 1; it must be 0 to 0 (its length, as queries are its newest tokens). Kernels "
        "read the table as it is when they run: correct it, or count the new tokens in it.",
    ),
    "more queries than rows": (
        lambda: attend(with_lengths(torch.tensor([9]), torch.full((1,), 2).int())),
        ShapeError,
        "counts[0] is 2; it must be 0 to 1 (the rows of query). Kernels read the table as it is "
        "when they run: correct it, or give query more rows.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    assert_says(ERRORS[name])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: d.advance(-1),
        lambda d: d.advance(33),
        lambda d: d.update(torch.ones(2)),
        lambda d: d.update(torch.tensor([7, 1 << 32])),
    ],
)
def test_what_is_refused_changes_no_length(wrong) -> None:
    made = decode(5, 6)
    with pytest.raises((ShapeError, DtypeError)):
        wrong(made)
    assert made.lengths.tolist() == [5, 6]
    made.advance(2)
    made.update(torch.tensor([9, 1]))  # int64 is as good
    assert made.lengths.tolist() == [9, 1]


def test_counts_of_any_integers() -> None:
    """As lengths: int64 counts were refused."""
    wide = with_lengths(torch.tensor([5, 6]), torch.tensor([1, 0]))
    assert wide.table.counts is not None and wide.table.counts.dtype == torch.int32
    assert attend(wide).shape == (2, 1, 1, 8)


def test_of_numbers_that_nobody_may_read_the_nearest_that_fit_stand_for_others() -> None:
    """As on a device, whose lengths are not waited for."""

    @torch.compile(backend="eager", fullgraph=True)
    def lengths(numbers: torch.Tensor) -> torch.Tensor:
        return _narrowed("lengths", numbers)

    most = (1 << 31) - 1
    found = lengths(torch.tensor([(1 << 32) + 6, -(1 << 32) + 6, 5]))
    assert found.tolist() == [most, -most, 5] and found.dtype == torch.int32


def test_comparing_masks_and_tables_gives_a_truth() -> None:
    """A dataclass compares its tensors, whose truth is ambiguous."""
    first, second = decode(5, 6), decode(5, 6)
    assert first == first and first != second
    assert first.table != second.table and first.table in [first.table]
    assert first.mask.lists() == first.mask.lists() and len({first, second, first}) == 2


def test_a_stale_mask_is_refused_over_a_cache() -> None:
    """Calls over a cache did not look at what their mask was built from."""
    tree = {"ids": torch.zeros(32, dtype=torch.int64)}
    mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (tree["ids"][q] == tree["ids"][kv]), None, None, 32, 32
    )
    made = mask.for_decode(torch.tensor([9, 20]))
    for _ in range(3):
        attend(made)
    tree["ids"] = torch.arange(32)
    with pytest.raises(ModError, match="is another tensor with other values"):
        attend(made)
    tree["ids"] = torch.zeros(32, dtype=torch.int64)
    attend(made)
    tree["ids"][3] = 1
    with pytest.raises(ModError, match="was changed in place"):
        attend(made)
