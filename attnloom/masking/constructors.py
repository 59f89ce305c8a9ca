"""BlockMask constructors for masks that are known without a mask_mod."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Self

from attnloom.errors import DtypeError, ShapeError
from attnloom.ir.node import BoundProgram
from attnloom.masking import known_masks, versions
from attnloom.masking.arguments import (
    check_flag,
    check_mask_mod,
    check_one_device,
    check_tensor,
    paired_ids,
    read_int,
    read_lengths,
)
from attnloom.masking.build import build
from attnloom.masking.dynamo import outside_graph
from attnloom.masking.lists import BlockLists, TileGrid, block_size_pair
from attnloom.masking.transforms import outside_transforms
from attnloom.masking.views import MaskMod, noop_mask
from attnloom.trace.names import known_as, mod_name

Mask = TypeVar("Mask", bound="KnownMasks")


class KnownMasks:
    """Mixed into BlockMask; every mask here captures its tables, so partial tiles are exact."""

    # of what lists were made from; None where nobody knows
    _reading: versions.Reading | None = None
    # lists are what the mask_mod said, and no choice of the caller's
    _lists_of_mod: bool = False

    if TYPE_CHECKING:
        mask_mod: MaskMod

        @classmethod
        def from_lists(
            cls, lists: BlockLists, mask_mod: MaskMod, batch_dims: Any = None
        ) -> Self: ...

    @classmethod
    @outside_graph
    @outside_transforms
    def from_dense(cls, mask: torch.Tensor, BLOCK_SIZE: int | tuple[int, int] = 128) -> Self:
        """The mask of a dense bool tensor.

        Args:
            mask: [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN] bool, True where a
                score is kept; any strides. It is kept and read in partial tiles, so do not change
                it.
            BLOCK_SIZE: one size or (query, key), powers of two from 16.
        Returns:
            A mask of shape [B, H, Q_LEN, KV_LEN]; dimensions left out are 1.
        Raises:
            DtypeError: mask is not bool. ShapeError: it has fewer than 2 or more than 4 dimensions.
        """
        check_tensor("mask", mask)
        if mask.dtype is not torch.bool:
            raise DtypeError(
                f"mask is {mask.dtype}; it must be torch.bool, True where a score is kept. For 0/1 "
                "use mask.bool(), for an additive mask mask == 0."
            )
        if not 2 <= mask.dim() <= 4:
            raise ShapeError(f"mask has shape {list(mask.shape)}; it must be [B, H, Q, KV].")
        table = mask[(None,) * (4 - mask.dim())]
        batch_dims = tuple(table.shape[:2])
        for dim in (0, 1):
            if table.shape[dim] > 1 and table.stride(dim) == 0:
                table = table.narrow(dim, 0, 1)
        lists = known_masks.table_lists(table, block_size_pair(BLOCK_SIZE))
        mod = _named("from_dense", known_masks.bind_tables(known_masks.table_mask, table))
        return _read(cls.from_lists(lists, mod, batch_dims))

    @classmethod
    @outside_graph
    @outside_transforms
    def from_block_bool(
        cls,
        live: torch.Tensor,
        full: torch.Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
    ) -> Self:
        """The mask of tables of tiles, as block-sparse attention methods choose them.

        Args:
            live: [q_blocks, kv_blocks], [H, ...] or [B, H, ...] bool: tiles that are computed.
            full: the same shape: live tiles where mask_mod is not asked. Default: all of them
                without a mask_mod, none with one.
            mask_mod: for live tiles that are not full.
            seq_lengths: (Q_LEN, KV_LEN) in tokens; default: whole tiles.
        Raises:
            DtypeError: live or full is not bool. ShapeError: their shapes differ, have fewer than 2
            or more than 4 dimensions, or do not fit seq_lengths.
        """
        check_tensor("live", live)
        check_mask_mod(mask_mod)
        if full is not None:
            check_tensor("full", full)
        if seq_lengths is not None:
            seq_lengths = read_lengths("seq_lengths", seq_lengths)
        full = torch.full_like(live, mask_mod is None) if full is None else full
        block = block_size_pair(BLOCK_SIZE)
        lists = known_masks.block_bool_lists(live, full, block, seq_lengths)
        return cls.from_lists(lists, noop_mask if mask_mod is None else mask_mod)

    @classmethod
    @outside_graph
    @outside_transforms
    def from_key_ranges(
        cls,
        start: torch.Tensor,
        stop: torch.Tensor,
        kv_len: int,
        BLOCK_SIZE: int | tuple[int, int] = 128,
    ) -> Self:
        """Each query sees the keys start .. stop - 1, in time linear in Q_LEN and live tiles.

        Args:
            start, stop: [Q_LEN], [H, Q_LEN] or [B, H, Q_LEN] integers; values outside 0 .. kv_len
                are cut to it, stop <= start sees no key.
            kv_len: KV_LEN.
        Raises:
            DtypeError, ShapeError: start and stop are not integers, or do not broadcast together.
        """
        kv_len = _length("kv_len", kv_len)
        for name, tensor in (("start", start), ("stop", stop)):
            known_masks.check_integer(name, tensor, (1, 2, 3))
        check_one_device(("start", start), ("stop", stop))
        try:
            start, stop = torch.broadcast_tensors(start, stop)
        except RuntimeError as error:
            raise ShapeError(
                f"start {list(start.shape)} and stop {list(stop.shape)} do not broadcast together."
            ) from error
        lead = (None,) * (3 - start.dim())
        start, stop = (t.to(torch.int64).clamp(0, kv_len)[lead].contiguous() for t in (start, stop))
        ranges = known_masks.KeyRanges(start, stop, kv_len)
        lists = known_masks.range_lists(ranges, block_size_pair(BLOCK_SIZE))
        return cls.from_lists(lists, _named("from_key_ranges", known_masks.range_mod(ranges)))

    @classmethod
    @outside_graph
    @outside_transforms
    def from_cu_seqlens(
        cls,
        cu_q: torch.Tensor,
        cu_kv: torch.Tensor | None = None,
        *,
        causal: bool = False,
        mask_mod: MaskMod | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        H: int | None = None,
    ) -> Self:
        """Documents packed one after the other; a query sees the keys of its own document.

        Args:
            cu_q: [documents + 1] integers, cumulative query lengths from 0; lengths may be 0.
            cu_kv: the same of keys; default: cu_q.
            causal: within each document, aligned at the end: the last query sees the last key (as
                FlashAttention's variable-length functions).
            mask_mod: inside each document, which it sees as a batch entry of its own: b is the
                document, q_idx and kv_idx count from its start.
            q_len, kv_len: Q_LEN and KV_LEN where they go beyond the last document; queries out
                there see no key.
            H: query heads, for a mask_mod that tells them apart.
        Returns:
            A mask of shape [1, H or 1, Q_LEN, KV_LEN]. Without mask_mod its lists follow directly
            from the lengths; with one, tiles are classified as by create_block_mask.
        Raises:
            DtypeError, ShapeError, OptionError: no cumulative lengths, or of other documents.
            TraceError: mask_mod cannot be traced.
        """
        check_flag("causal", causal)
        check_mask_mod(mask_mod)
        heads = _heads(H)
        cu_kv = cu_q if cu_kv is None else cu_kv
        for name, cu in (("cu_q", cu_q), ("cu_kv", cu_kv)):
            known_masks.check_integer(name, cu, (1,))
        check_one_device(("cu_q", cu_q), ("cu_kv", cu_kv))
        lengths = (
            _last(cu_q) if q_len is None else _length("q_len", q_len),
            _last(cu_kv) if kv_len is None else _length("kv_len", kv_len),
        )
        ranges, tables = known_masks.packed_documents(cu_q, cu_kv, lengths, causal)
        block = block_size_pair(BLOCK_SIZE)
        mod = _named("from_cu_seqlens", known_masks.packed_mod(ranges, tables, mask_mod), mask_mod)
        if mask_mod is None:
            return _read(cls.from_lists(known_masks.range_lists(ranges, block), mod))
        built = build(mod, replace(ranges.grid(block), num_heads=heads), cu_q.device)
        return _of_mod(cls.from_lists(built.lists, mod, (1, heads)), built.bound)

    @classmethod
    @outside_graph
    @outside_transforms
    def from_document_ids(
        cls,
        ids_q: torch.Tensor,
        ids_kv: torch.Tensor | None = None,
        *,
        mask_mod: MaskMod | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        H: int | None = None,
    ) -> Self:
        """A query sees the keys that carry its document id.

        Args:
            ids_q: [Q_LEN] or [B, Q_LEN] integers, in any order; documents may be interleaved.
            ids_kv: the same of keys; default: ids_q.
            mask_mod: inside documents: b and h as ever, q_idx and kv_idx are positions within the
                document (how many earlier tokens carry the same id). One that reads b needs ids
                [B, Q_LEN].
            H: query heads, for a mask_mod that tells them apart.
        Returns:
            A mask of shape [B, H or 1, Q_LEN, KV_LEN]. Where every document's keys are contiguous
            its lists follow directly; otherwise tiles are classified as by create_block_mask.
        Raises:
            DtypeError, ShapeError: the ids are not integers, or of different batch sizes.
            TraceError: mask_mod cannot be traced.
        """
        check_mask_mod(mask_mod)
        heads = _heads(H)
        ids_kv = ids_q if ids_kv is None else ids_kv
        for name, ids in (("ids_q", ids_q), ("ids_kv", ids_kv)):
            known_masks.check_integer(name, ids, (1, 2))
        ids_q, ids_kv = paired_ids(("ids_q", ids_q), ("ids_kv", ids_kv))
        B = ids_q.shape[0]
        documents = known_masks.documents_of(ids_q, ids_kv)
        block = block_size_pair(BLOCK_SIZE)
        mod = known_masks.document_mod(documents, mask_mod)
        mod = _named("from_document_ids", mod, mask_mod)
        if mask_mod is None and documents.ranges is not None:
            lists = known_masks.range_lists(documents.ranges, block)
            return _read(cls.from_lists(lists, mod, (B, 1)))
        grid = TileGrid(B, heads, ids_q.shape[1], ids_kv.shape[1], *block)
        built = build(mod, grid, ids_q.device)
        return _of_mod(cls.from_lists(built.lists, mod, (B, heads)), built.bound)


def _named(constructor: str, mod: MaskMod, mask_mod: MaskMod | None = None) -> MaskMod:
    """The mod, known as the caller's own if there is one, else as what made the mask."""
    name = f"BlockMask.{constructor}" if mask_mod is None else mod_name(mask_mod)
    return known_as(mod, name)


def _read(mask: Mask, bound: BoundProgram | None = None) -> Mask:
    mask._reading = versions.read(mask.mask_mod, bound)
    return mask


def _of_mod(mask: Mask, bound: BoundProgram) -> Mask:
    """A mask whose tiles its mask_mod decided, for as many batch entries and heads as it has."""
    mask._lists_of_mod = True
    return _read(mask, bound)


def _heads(H: int | None) -> int:
    heads = 1 if H is None else read_int("H", H)
    if heads < 0:
        raise ShapeError(f"H is {heads}; sizes are 0 or more.")
    return heads


def _last(cumulative: torch.Tensor) -> int:
    return int(cumulative[-1]) if cumulative.numel() else 0


def _length(name: str, value: int) -> int:
    length = read_int(name, value)
    if length < 0:
        raise ShapeError(f"{name} is {length}; lengths are 0 or more.")
    return length
