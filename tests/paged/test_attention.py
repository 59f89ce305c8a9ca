"""Attention over pages against the oracle, which gathers each sequence into a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attnloom import BlockMask, PagedKV, PageTable, create_block_mask, flex_attention
from attnloom.api.attention import AuxRequest
from attnloom.backends.reference import paged_reference
from tests.paged.draw import MASKS, SCORES, Problem, check, draw

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
BACKENDS = ["cpu", "tiled"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("counts", [(1, 1, 1), (7, 1, 16), (40, 1, 130)], ids=str)
def test_page_sizes_and_ragged_queries(page_size: int, counts: tuple, backend: str) -> None:
    check(Problem(page_size=page_size, counts=counts, mask="causal", score="alibi"), backend)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("q_len", [60, 70])
def test_values_read_where_they_lie_and_copied(
    q_len: int, dtype: torch.dtype, page_size: int
) -> None:
    """Few rows read pages shorter than a tile in place; more of them have them copied."""
    problem = Problem(
        Hq=8,
        Hkv=2,
        Dv=32,
        lengths=(400, 131, 73),
        counts=(q_len, 33, 1),
        page_size=page_size,
        dtype=dtype,
        mask="window",
        score="alibi",
    )
    check(problem, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 20, 1)], ids=str)
def test_dtypes(counts: tuple, dtype: torch.dtype, backend: str) -> None:
    check(Problem(dtype=dtype, counts=counts, mask="window", score="alibi"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 16, 5), (33, 70, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, counts: tuple, backend: str) -> None:
    check(Problem(counts=counts, mask=mask), backend)


@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 2, 1)], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, counts: tuple) -> None:
    check(Problem(counts=counts, score=score, mask="causal"), "cpu")


@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (8, 1), (14, 2), (5, 5)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 9, 1), (20, 2, 1)], ids=str)
def test_head_groups(Hq: int, Hkv: int, counts: tuple) -> None:
    check(Problem(Hq=Hq, Hkv=Hkv, counts=counts, mask="by_head", score="alibi"), "cpu")


@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (96, 40), (128, 128)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (20, 2, 1)], ids=str)
def test_head_dims(D: int, Dv: int, counts: tuple) -> None:
    check(Problem(D=D, Dv=Dv, counts=counts, mask="causal"), "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(0, 1, 16), (17, 63, 64), (65, 0, 1000)], ids=str)
def test_lengths(lengths: tuple, backend: str) -> None:
    counts = tuple(min(n, 1) for n in lengths)
    check(Problem(lengths=lengths, counts=counts, mask="causal"), backend)
    check(Problem(lengths=lengths, counts=counts), backend)


@pytest.mark.parametrize("block", [16, 32, (16, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("counts", [(1, 1, 1), (16, 3, 8), (50, 100, 1)], ids=str)
def test_queries_across_blocks_of_the_mask(block, counts: tuple) -> None:
    """Queries begin anywhere, so that a few of them lie in two blocks with other lists."""
    problem = Problem(lengths=(135, 170, 16), counts=counts, mask="window", block=block)
    check(problem, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 2, 1)], ids=str)
def test_contiguous_cache(counts: tuple, backend: str) -> None:
    """Lengths of their own in [B, Hkv, MAX_LEN, D] tensors."""
    check(Problem(page_size=0, counts=counts, mask="window", score="alibi"), backend)


@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 2, 1)], ids=str)
def test_one_cache_for_a_batch_of_queries(counts: tuple) -> None:
    check(Problem(page_size=0, shared=True, counts=counts, mask="causal"), "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 2, 1)], ids=str)
def test_strided_pages(counts: tuple, backend: str) -> None:
    """Storage with heads inside rows, [num_pages, page_size, Hkv, D] (case 39)."""
    check(Problem(strided=True, counts=counts, mask="causal"), backend)


def test_two_sequences_on_the_same_pages() -> None:
    drawn = draw(Problem(lengths=(100, 100, 37), counts=(1, 1, 1)))
    assert drawn.table.pages is not None
    drawn.table.pages[1] = drawn.table.pages[0]
    out = flex_attention(drawn.query[:1].expand(3, -1, -1, -1), drawn.kv, enable_gqa=True)
    assert torch.equal(out[0], out[1])
    want = paged_reference(drawn.query[:1].expand(3, -1, -1, -1), *drawn.stored, drawn.table)
    torch.testing.assert_close(out, want.out.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 2, 1)], ids=str)
def test_a_decode_mask_equals_rows_of_the_mask(counts: tuple) -> None:
    """for_decode against a mask built for these queries alone (cases 20 and 77)."""
    problem = Problem(page_size=0, lengths=(90, 3, 50), counts=counts, mask="window")
    drawn = draw(problem)
    whole = drawn.mask
    assert isinstance(whole, BlockMask)
    key, value = drawn.stored
    found = flex_attention(
        drawn.query,
        key,
        value,
        block_mask=whole.for_decode(drawn.table.lengths, drawn.table.counts),
        enable_gqa=True,
    )
    for b, (length, count) in enumerate(zip(problem.lengths, counts, strict=True)):
        part = whole.rows(length - count, length).crop(count, length)
        alone = flex_attention(
            drawn.query[b : b + 1, :, :count], key[b : b + 1, :, :length],
            value[b : b + 1, :, :length], block_mask=part, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(found[b : b + 1, :, :count], alone, atol=2e-6, rtol=2e-6)


def test_a_wide_pool_of_pages() -> None:
    """Page offsets pass 2^31 elements (case 15); the pool is one expanded page, so it is small."""
    pool = 2**31 // (16 * 64) + 2
    storage = torch.randn(1, 1, 16, 64).expand(pool, 1, 16, 64)
    table = PageTable(
        torch.tensor([30], dtype=torch.int32),
        None,
        torch.tensor([[pool - 1, 5]], dtype=torch.int32),
        16,
        30,
    )
    query = torch.randn(1, 1, 1, 64)
    out = flex_attention(query, PagedKV(storage, storage, table))
    small = PagedKV(
        storage[:6],
        storage[:6],
        PageTable(table.lengths, None, torch.tensor([[0, 5]], dtype=torch.int32), 16, 30),
    )
    torch.testing.assert_close(out, flex_attention(query, small))


def test_log_sum_exp_and_greatest_scores() -> None:
    drawn = draw(Problem(counts=(5, 1, 20), mask="causal"))
    aux = AuxRequest(lse=True, max_scores=True)
    _, found = flex_attention(
        drawn.query, drawn.kv, block_mask=drawn.mask, enable_gqa=True, return_aux=aux
    )
    want = paged_reference(drawn.query, *drawn.stored, drawn.table, None, drawn.mask)
    for mine, theirs in ((found.lse, want.lse), (found.max_scores, want.max_scores)):
        torch.testing.assert_close(mine, theirs.float(), atol=1e-5, rtol=1e-5)
    assert (found.lse[0, :, 5:] == -torch.inf).all()


@dataclass
class _Places:
    """A mask_mod that remembers whether it is asked beyond the sequences."""

    table: torch.Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & self.table[b, kv_idx]


def test_captured_tables_are_read_at_logical_positions() -> None:
    problem = Problem(counts=(6, 1, 20))
    drawn = draw(problem)
    kept = torch.rand(3, 256, generator=torch.Generator().manual_seed(1)) < 0.7
    mask = create_block_mask(_Places(kept), 3, None, 256, 256, BLOCK_SIZE=32)
    out = flex_attention(drawn.query, drawn.kv, block_mask=mask, enable_gqa=True)
    want = paged_reference(drawn.query, *drawn.stored, drawn.table, None, mask)
    torch.testing.assert_close(out, want.out.float(), atol=1e-5, rtol=1e-5)
