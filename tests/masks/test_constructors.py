"""Masks from dense tensors, key ranges and documents."""

from __future__ import annotations

import pytest
import torch

from attnloom.api.masks import create_block_mask
from attnloom.block_mask import BlockMask
from attnloom.errors import DtypeError, OptionError, ShapeError
from tests.masks.mods import MODS, Sizes, dense, drawn
from tests.masks.test_classify import assert_sorted, codes_of, tile_codes

CAUSAL = lambda b, h, q, kv: q >= kv


def assert_exact(mask: BlockMask, kept: torch.Tensor) -> None:
    """The mask keeps these scores, its mask_mod says so too, and its lists are the tightest."""
    assert mask.shape == tuple(kept.shape)
    assert torch.equal(mask.to_mask(), kept)
    assert_sorted(mask.lists())
    expected = tile_codes(kept, *mask.BLOCK_SIZE)
    assert torch.equal(codes_of(mask.lists(), *kept.shape[:2]), expected)
    B, H, Q, KV = kept.shape
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    direct = mask.mask_mod(b, h, torch.arange(Q)[:, None], torch.arange(KV))
    assert torch.equal(direct.expand(kept.shape), kept)


@pytest.mark.parametrize("make", MODS, ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("sizes", "block"),
    [(Sizes(2, 3, 200, 150), (32, 16)), (Sizes(1, 1, 63, 1), 16), (Sizes(1, 2, 500, 300), 1024)],
    ids=str,
)
def test_from_dense(make, sizes, block):
    kept = dense(make(sizes), sizes)
    assert_exact(BlockMask.from_dense(kept, BLOCK_SIZE=block), kept)


def test_from_dense_with_fewer_dimensions_and_odd_strides():
    kept = torch.rand(40, 3, 70, generator=drawn(0)) < 0.2
    mask = BlockMask.from_dense(kept.transpose(0, 1), BLOCK_SIZE=16)
    assert_exact(mask, kept.transpose(0, 1)[None])
    assert_exact(BlockMask.from_dense(kept[:, 0], BLOCK_SIZE=16), kept[:, 0][None, None])


def test_from_dense_stores_an_expanded_mask_once():
    kept = (torch.rand(2, 1, 64, 64, generator=drawn(0)) < 0.5).expand(2, 5, 64, 64)
    mask = BlockMask.from_dense(kept, BLOCK_SIZE=16)
    assert mask.lists().num_heads == 1
    assert_exact(mask, kept)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_from_dense_of_nothing(q_len, kv_len):
    mask = BlockMask.from_dense(torch.ones(q_len, kv_len, dtype=torch.bool))
    assert mask.lists().entries.numel() == 0
    assert mask.shape == (1, 1, q_len, kv_len)


@pytest.mark.parametrize("dims", [(), (3,), (2, 3)], ids=str)
def test_from_block_bool(dims):
    live = torch.rand(*dims, 5, 7, generator=drawn(1)) < 0.4
    tokens = live.repeat_interleave(16, -2).repeat_interleave(32, -1)
    tokens = tokens[(None,) * (2 - len(dims))][..., :75, :200]
    every = BlockMask.from_block_bool(live, BLOCK_SIZE=(16, 32), seq_lengths=(75, 200))
    assert torch.equal(every.to_mask(), tokens)
    assert not (every.lists().entries & 1).any()
    causal = BlockMask.from_block_bool(
        live, BLOCK_SIZE=(16, 32), mask_mod=CAUSAL, seq_lengths=(75, 200)
    )
    assert torch.equal(causal.to_mask(), tokens & torch.ones(75, 200, dtype=torch.bool).tril())
    full = live & (torch.rand(live.shape, generator=drawn(2)) < 0.5)
    mixed = BlockMask.from_block_bool(live, full, (16, 32), CAUSAL)
    assert mixed.shape[-2:] == (80, 224)
    assert int(((mixed.lists().entries & 1) == 0).sum()) == int(full.sum())


@pytest.mark.parametrize("dims", [(), (3,), (2, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("block", [16, (64, 16), (16, 128), 1024], ids=str)
@pytest.mark.parametrize("longest", [5, 100, 400])
def test_from_key_ranges(dims, block, longest):
    g = drawn(len(dims) + longest)
    start = torch.randint(-20, 230, (*dims, 150), generator=g)
    stop = start + torch.randint(-longest // 4, longest, (*dims, 150), generator=g)
    mask = BlockMask.from_key_ranges(start, stop, 211, BLOCK_SIZE=block)
    kv = torch.arange(211)
    kept = (kv >= start[..., None]) & (kv < stop[..., None])
    assert_exact(mask, kept[(None,) * (2 - len(dims))])


def test_from_key_ranges_of_whole_rows_is_full():
    mask = BlockMask.from_key_ranges(
        torch.zeros(100, dtype=torch.int32), torch.tensor(77).expand(100), 77
    )
    assert_exact(mask, torch.ones(1, 1, 100, 77, dtype=torch.bool))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_from_key_ranges_of_nothing(q_len, kv_len):
    zeros = torch.zeros(q_len, dtype=torch.int64)
    mask = BlockMask.from_key_ranges(zeros, zeros + 5, kv_len)
    assert mask.lists().entries.numel() == 0
    assert mask.shape == (1, 1, q_len, kv_len)


def packed(lengths_q, lengths_kv, inner) -> torch.Tensor:
    """Dense mask of packed documents, document by document."""
    kept = torch.zeros(sum(lengths_q), sum(lengths_kv), dtype=torch.bool)
    q0 = kv0 = 0
    for document, (n, m) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        q, kv = torch.arange(n)[:, None], torch.arange(m)
        kept[q0 : q0 + n, kv0 : kv0 + m] = inner(document, q, kv, n, m)
        q0, kv0 = q0 + n, kv0 + m
    return kept[None, None]


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


LENGTHS = [
    ([5, 0, 40, 1, 100, 33], [7, 3, 0, 1, 90, 64]),
    ([64, 64, 64], [64, 64, 64]),
    ([0, 0, 7], [0, 9, 7]),
    ([200], [130]),
]
INNERS = {
    "plain": ({}, lambda d, q, kv, n, m: torch.ones(1, 1, dtype=torch.bool)),
    "causal": ({"causal": True}, lambda d, q, kv, n, m: kv - m <= q - n),
    "mask_mod": ({"mask_mod": CAUSAL}, lambda d, q, kv, n, m: q >= kv),
    "by_document": (
        {"mask_mod": lambda b, h, q, kv: (q - kv).abs() <= 4 * b},
        lambda d, q, kv, n, m: (q - kv).abs() <= 4 * d,
    ),
    "both": (
        {"causal": True, "mask_mod": lambda b, h, q, kv: kv % 2 == 0},
        lambda d, q, kv, n, m: (kv - m <= q - n) & (kv % 2 == 0),
    ),
}


@pytest.mark.parametrize("name", INNERS)
@pytest.mark.parametrize(("lengths_q", "lengths_kv"), LENGTHS, ids=str)
@pytest.mark.parametrize("block", [16, (128, 32)], ids=str)
def test_from_cu_seqlens(name, lengths_q, lengths_kv, block):
    options, inner = INNERS[name]
    mask = BlockMask.from_cu_seqlens(
        cumulative(lengths_q), cumulative(lengths_kv), BLOCK_SIZE=block, **options
    )
    assert_exact(mask, packed(lengths_q, lengths_kv, inner))


def test_from_cu_seqlens_beyond_the_last_document_sees_no_key():
    mask = BlockMask.from_cu_seqlens(
        cumulative([10, 20]), causal=True, q_len=50, kv_len=40, BLOCK_SIZE=16
    )
    kept = torch.zeros(1, 1, 50, 40, dtype=torch.bool)
    kept[..., :30, :30] = packed([10, 20], [10, 20], lambda d, q, kv, n, m: q >= kv)
    assert_exact(mask, kept)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("kind", ["sorted", "contiguous", "interleaved"])
@pytest.mark.parametrize("with_mod", [False, True])
def test_from_document_ids(rows, kind, with_mod):
    g = drawn(rows)
    B = max(rows, 1)
    ids = (torch.rand(B, 150, generator=g) < 0.05).cumsum(1)
    if kind == "contiguous":
        ids = (ids * 7) % 31  # each document is one stretch, in no order
    if kind == "interleaved":
        ids = torch.randint(0, 4, (B, 150), generator=g)
    ids_kv = ids[:, :121]
    given = (ids, ids_kv) if rows else (ids[0], ids_kv[0])
    mod = (lambda b, h, q, kv: (q >= kv) & (q - kv < 9 + b)) if with_mod else None
    mask = BlockMask.from_document_ids(*given, mask_mod=mod, BLOCK_SIZE=16)
    kept = ids[:, :, None] == ids_kv[:, None]
    if with_mod:
        rank = torch.stack(
            [torch.tensor([int((row[:i] == row[i]).sum()) for i in range(150)]) for row in ids]
        )
        q, kv = rank[:, :, None], rank[:, None, :121]
        kept = kept & (q >= kv) & (q - kv < 9 + torch.arange(B)[:, None, None])
    assert_exact(mask, kept[:, None])


def test_from_document_ids_of_mixed_types_and_unknown_ids():
    ids_q = torch.tensor([5, 5, -1, 2, 9], dtype=torch.int32)
    ids_kv = torch.tensor([2, 2, 5, 5, 5, 7])
    mask = BlockMask.from_document_ids(ids_q, ids_kv, BLOCK_SIZE=16)
    assert_exact(mask, (ids_q[:, None] == ids_kv)[None, None])


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_documents(q_len, kv_len):
    ids_q, ids_kv = torch.zeros(q_len, dtype=torch.int64), torch.zeros(kv_len, dtype=torch.int64)
    for mask in (
        BlockMask.from_document_ids(ids_q, ids_kv),
        BlockMask.from_document_ids(ids_q, ids_kv, mask_mod=CAUSAL),
        BlockMask.from_cu_seqlens(cumulative([]), q_len=q_len, kv_len=kv_len),
        BlockMask.from_cu_seqlens(cumulative([q_len]), cumulative([kv_len]), mask_mod=CAUSAL),
    ):
        assert mask.shape == (1, 1, q_len, kv_len)
        assert not mask.to_mask().any()
        assert mask.to_string()


def test_constructors_agree_with_create_block_mask():
    lengths = [100, 3, 0, 217, 64, 128]
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    expected = create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None, None, 512, 512
    ).lists()
    for mask in (
        BlockMask.from_cu_seqlens(cumulative(lengths), causal=True),
        BlockMask.from_cu_seqlens(cumulative(lengths), mask_mod=CAUSAL),
        BlockMask.from_document_ids(ids, mask_mod=CAUSAL),
    ):
        assert torch.equal(mask.lists().entries, expected.entries)
        assert torch.equal(mask.lists().row_offsets, expected.row_offsets)


ONES = torch.ones(4, 4)
CU = torch.tensor([0, 3, 7])
NUM = torch.ones(1, 1, 2, dtype=torch.int32)
IDX = torch.zeros(1, 1, 2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: BlockMask.from_dense(ONES), DtypeError, "mask is torch.float32"),
        (lambda: BlockMask.from_dense(ONES[0] > 0), ShapeError, "mask has shape [4]"),
        (lambda: BlockMask.from_block_bool(ONES), DtypeError, "live is torch.float32"),
        (
            lambda: BlockMask.from_block_bool(ONES > 0, ONES[0] > 0),
            ShapeError,
            "live has shape [4, 4] and full [4]",
        ),
        (
            lambda: BlockMask.from_block_bool(ONES > 0, seq_lengths=(512, 600)),
            ShapeError,
            "live has 4 x 4 tiles, but seq_lengths (512, 600) at block size (128, 128) make 4 x 5",
        ),
        (lambda: BlockMask.from_key_ranges(ONES[0], CU, 3), DtypeError, "start is torch.float32"),
        (lambda: BlockMask.from_key_ranges(CU, CU[:2], 3), ShapeError, "start [3] and stop [2]"),
        (lambda: BlockMask.from_cu_seqlens(CU + 1), OptionError, "cu_q starts with [1, 4, 8]"),
        (lambda: BlockMask.from_cu_seqlens(CU.flip(0) - 7), OptionError, "never decrease"),
        (lambda: BlockMask.from_cu_seqlens(CU, CU[:2]), ShapeError, "cu_q describes 2 documents"),
        (lambda: BlockMask.from_cu_seqlens(CU, q_len=5), ShapeError, "cu_q ends at 7, beyond"),
        (lambda: BlockMask.from_cu_seqlens(CU[None]), ShapeError, "cu_q has shape [1, 3]"),
        (lambda: BlockMask.from_cu_seqlens([0, 3]), DtypeError, "cu_q is a list"),
        (lambda: BlockMask.from_document_ids(CU > 1), DtypeError, "ids_q is torch.bool"),
        (
            lambda: BlockMask.from_document_ids(CU.expand(2, 3), CU.expand(3, 3)),
            ShapeError,
            "ids_q has 2 batch entries and ids_kv 3",
        ),
        (lambda: BlockMask.from_dense(ONES > 0, BLOCK_SIZE=48), OptionError, "BLOCK_SIZE is 48"),
        (lambda: BlockMask.from_dense(ONES > 0, BLOCK_SIZE=8), OptionError, "power of two from 16"),
        (
            lambda: BlockMask.from_kv_blocks(NUM, IDX, seq_lengths=(1000, 64)),
            ShapeError,
            "kv_num_blocks has 2 rows of blocks, but Q_LEN 1000 at block size 128 makes 8",
        ),
        (lambda: BlockMask.from_kv_blocks(NUM[0], IDX), ShapeError, "kv_num_blocks is [1, 2]"),
        (lambda: BlockMask.from_kv_blocks(NUM, IDX, NUM), ShapeError, "give both or neither"),
        (
            lambda: BlockMask.from_kv_blocks(NUM, IDX + 2).lists(),
            ShapeError,
            "kv_indices lists block 2, but KV_LEN 256",
        ),
        (
            lambda: BlockMask.from_kv_blocks(NUM, IDX, NUM, IDX).lists(),
            ShapeError,
            "kv block 0 is listed twice in query block 0",
        ),
        (
            lambda: BlockMask.from_kv_blocks(NUM, IDX, dq_kv_order=3),
            OptionError,
            "dq_kv_order is 3",
        ),
    ],
)
def test_errors_name_the_values(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
