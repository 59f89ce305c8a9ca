"""The mask of queries that stand anywhere in their sequences, without making another mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnloom.errors import DtypeError, OptionError, ShapeError, counted
from attnloom.masking.arguments import check_tensor, read_int
from attnloom.paged.table import PageTable

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class DecodeMask:
    """A BlockMask of whole sequences, read at the positions of a batch's newest tokens.

    Made by `BlockMask.for_decode`; flex_attention takes it as block_mask, with key and value of
    [B, Hkv, MAX_LEN, D] that sequence b fills up to lengths[b]. Lengths are read by the kernels:
    `update` them, or change the tensor itself, also between replays of a CUDA graph. Lengths on the
    CPU are checked against the mask and the key tensor in each call; elsewhere nobody reads them
    before the kernels, which see no key beyond either.

    Attributes:
        mask: the BlockMask; its lists and mask_mod are used as they are.
        table: PageTable without pages.
    """

    mask: Any
    table: PageTable

    @property
    def lengths(self) -> torch.Tensor:
        """[B] int32, tokens of each sequence."""
        return self.table.lengths

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN) of the whole mask; 1 broadcasts."""
        return self.mask.shape

    def update(self, lengths: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Take other lengths, in place. Waits for nothing.

        Args:
            counts: queries of each sequence, for a mask that was made with some; None: as they are.
        Raises:
            DtypeError, ShapeError: they are no lists of integers, one for each sequence, or a
                number on the CPU does not fit 32 bits.
            OptionError: counts, which the mask was made without.
        """
        _check_integers("lengths", lengths, "the tokens of each sequence, the queries included")
        given = [("lengths", lengths, self.lengths)]
        if counts is not None:
            _check_integers("counts", counts, "the queries of each sequence")
            if self.table.counts is None:
                raise OptionError(
                    "this mask was made without counts, so that every row of query is one. Give "
                    "them to for_decode too: for_decode(lengths, counts)."
                )
            given.append(("counts", counts, self.table.counts))
        for name, new, old in given:
            if new.shape != old.shape:
                raise ShapeError(
                    f"{name} is {list(new.shape)}; this mask was made for "
                    f"{counted(old.numel(), 'sequence')}, one {name[:-1]} each. Call for_decode "
                    "again for another batch."
                )
        narrow = [_narrowed(name, new) for name, new, _ in given]  # all of them, or none
        for new, (_, _, old) in zip(narrow, given, strict=True):
            old.copy_(new, non_blocking=True)

    def advance(self, count: int = 1) -> None:
        """Let every sequence grow by `count` tokens, in place.

        Raises:
            ShapeError: count is no int of 0 or more, or more than any sequence may have.
        """
        given = read_int("count", count)
        if given < 0:
            raise ShapeError(
                f"count is {given}; advance lets every sequence grow, by 0 tokens or more. To take "
                "tokens back, or for a number of its own for each, give `update` the lengths."
            )
        if given > self.table.max_length:
            raise ShapeError(
                f"count is {given}, but the mask was built for sequences of up to "
                f"{counted(self.table.max_length, 'token')}. advance takes the tokens that are "
                "new, not all that there are; for those give `update` the lengths."
            )
        self.table.lengths.add_(given)


class Decoding:
    """What a BlockMask can do for inference."""

    def for_decode(self, lengths: torch.Tensor, counts: torch.Tensor | None = None) -> DecodeMask:
        """This mask at the newest tokens of sequences of any lengths.

        Query row i of batch entry b stands at position lengths[b] - counts[b] + i, for mask_mod and
        score_mod, and sees keys before lengths[b] that the mask keeps there. Nothing is built:
        kernels look up the lists of this mask, which must cover the longest sequence.

        Args:
            lengths: [B] integers, tokens of each sequence, the queries included. Kept, not copied,
                if it is int32: what is written to it later counts.
            counts: [B] integers, queries of each sequence, for padded queries; further rows of
                query give 0. Kept if it is int32, as lengths is. None: all rows of query.
        Returns:
            DecodeMask, which flex_attention takes as block_mask.
        Raises:
            DtypeError, ShapeError: lengths is no list of integers, or counts none of as many; a
                number on the CPU does not fit 32 bits.
        """
        _check_integers("lengths", lengths, "the tokens of each sequence, the queries included")
        if counts is not None:
            _check_integers("counts", counts, "the queries of each sequence")
            counts = _narrowed("counts", counts)
        longest = min(self.shape[-2:])  # type: ignore[attr-defined]
        return DecodeMask(self, PageTable(_narrowed("lengths", lengths), counts, None, 0, longest))


def _check_integers(name: str, numbers: torch.Tensor, what: str) -> None:
    check_tensor(name, numbers)
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype == torch.bool:
        raise DtypeError(f"{name} is {numbers.dtype}; it must hold integers, {what}. Use .int().")
    if numbers.dim() != 1:
        raise ShapeError(f"{name} is {list(numbers.shape)}; it must be [B], {what}.")


def _narrowed(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """In the 32 bits that kernels read. Of numbers on a device nobody knows whether they fit: the
    nearest that does stands for one that does not, and is as far out of range.

    Raises:
        ShapeError: a number on the CPU does not fit.
    """
    if numbers.dtype.itemsize < 4 or numbers.dtype == torch.int32:
        return numbers.int()
    wide = numbers.long()
    if wide.device.type != "cpu" or torch.compiler.is_compiling():
        return wide.clamp(-_MOST, _MOST).int()
    for b, number in enumerate(wide.tolist()):
        if not -_MOST <= number <= _MOST:
            raise ShapeError(
                f"{name}[{b}] is {number}, which does not fit the 32 bits that kernels count "
                f"tokens in. Correct it: {name} are those of one sequence each."
            )
    return wide.int()
