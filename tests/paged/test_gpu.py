"""Paged attention in Triton kernels on a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnloom import PagedKV, PagedKVCache, PageTable, create_block_mask, flex_attention
from attnloom.backends.reference import paged_reference
from attnloom.errors import UnsupportedError
from tests.paged.before import SOME, Rows, check_rows
from tests.paged.draw import MASKS, SCORES, Problem, causal, check

pytestmark = pytest.mark.gpu
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("counts", [(1, 1, 1), (7, 1, 16), (40, 1, 130)], ids=str)
@pytest.mark.parametrize("page_size", [0, 16, 32, 64, 128, 256])
def test_page_sizes(page_size: int, counts: tuple) -> None:
    problem = Problem(dtype=BF16, D=64, Dv=64, page_size=page_size, counts=counts, mask="causal")
    check(problem, "triton", "cuda")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (33, 70, 1)], ids=str)
def test_masks(mask: str, counts: tuple) -> None:
    check(Problem(dtype=FP16, D=64, Dv=64, mask=mask, counts=counts), "triton", "cuda")


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_scores(score: str, page_size: int) -> None:
    problem = Problem(dtype=BF16, D=64, Dv=64, page_size=page_size, score=score, mask="causal")
    check(problem, "triton", "cuda")


@pytest.mark.parametrize(
    ("D", "Dv"), [(128, 128), (192, 128), (64, 40), (96, 64), (96, 40), (96, 128)]
)
@pytest.mark.parametrize("page_size", [16, 256])
def test_head_dims(D: int, Dv: int, page_size: int) -> None:
    problem = Problem(dtype=BF16, D=D, Dv=Dv, page_size=page_size, counts=(3, 1, 20))
    check(problem, "triton", "cuda")


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 2)], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (96, 64)])
@pytest.mark.parametrize("page_size", [16, 32])
def test_small_pages(page_size: int, D: int, Dv: int, counts: tuple) -> None:
    """Lengths that end in the first, a middle and the last page of a tile, and behind it."""
    problem = Problem(dtype=BF16, D=D, Dv=Dv, page_size=page_size, counts=counts, mask="causal")
    for lengths in ((90, 3, 150), (128, 64, 2000)):
        check(replace(problem, lengths=lengths), "triton", "cuda")


@pytest.mark.parametrize("problem", SOME, ids=str)
def test_rows_before_the_sequence_are_empty(problem: Rows) -> None:
    check_rows(replace(problem, dtype=BF16, D=64), "triton", "cuda")


def test_untrusted_head_dims_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="key and value have head dimensions 80 and 24"):
        check(Problem(dtype=BF16, D=80, Dv=24), "triton", "cuda")


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128)])
def test_float32_head_dims(D: int, Dv: int) -> None:
    check(Problem(dtype=FP32, D=D, Dv=Dv, mask="causal"), "triton", "cuda")


def test_float32() -> None:
    check(Problem(dtype=FP32, mask="causal"), "triton", "cuda")


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_wide_pool_of_pages(page_size: int) -> None:
    """Page offsets pass 2^31 elements (case 15)."""
    pool = 2**31 // (page_size * 64) + 8
    storage = torch.empty(pool, 1, page_size, 64, dtype=BF16, device="cuda")
    used = torch.tensor([[pool - 1, 3, pool - 2]], dtype=torch.int32, device="cuda")
    storage[used[0].long()] = torch.randn(3, 1, page_size, 64, dtype=BF16, device="cuda")
    length = 3 * page_size - 5
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    query = torch.randn(1, 1, 1, 64, dtype=BF16, device="cuda")
    kv = PagedKV(storage, storage, PageTable(lengths, None, used, page_size, length))
    out = flex_attention(query, kv, kernel_options={"backend": "triton"})
    want = paged_reference(query, storage, storage, kv.table)
    torch.testing.assert_close(out, want.out.to(BF16), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("page_size", [16, 128])
def test_strided_pages(page_size: int) -> None:
    """Storage with heads inside rows, [num_pages, page_size, Hkv, D] (case 39)."""
    problem = Problem(dtype=BF16, D=64, Dv=64, page_size=page_size, strided=True, mask="causal")
    check(problem, "triton", "cuda")


def test_long_sequences_are_split() -> None:
    problem = Problem(dtype=BF16, D=64, Dv=64, lengths=(5000, 1, 20000), page_size=64)
    check(problem, "triton", "cuda")


def test_a_captured_graph_follows_the_cache() -> None:
    """One mask and one graph while sequences grow, are freed and come."""
    cache = PagedKVCache(200, 16, 2, 64, dtype=BF16, device="cuda")
    mask = create_block_mask(causal, None, None, 512, 512, "cuda")
    query = torch.randn(4, 4, 1, 64, dtype=BF16, device="cuda")
    key, value = (torch.randn(4, 2, 1, 64, dtype=BF16, device="cuda") for _ in range(2))
    batch = cache.empty_batch(4, max_length=512)
    sequences = [cache.new() for _ in range(3)]
    prompt = [torch.randn(3, 2, 90, 64, dtype=BF16, device="cuda") for _ in range(2)]
    cache.append(sequences, *prompt, counts=[90, 17, 64])

    def step() -> torch.Tensor:
        batch.write(key, value)
        return flex_attention(query, batch.layer(), block_mask=mask, enable_gqa=True)

    def advance() -> None:
        cache.extend(sequences, 1)
        batch.update(sequences, [1] * len(sequences))

    advance()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for turn in range(40):
        if turn == 20:
            cache.free(sequences.pop(1))
            sequences.append(cache.new())
        advance()
        for tensor in (query, key, value):
            tensor.normal_()
        graph.replay()
        want = paged_reference(query, *cache.layer_tensors(0), batch.table, None, mask)
        torch.testing.assert_close(out, want.out.to(BF16), atol=2e-2, rtol=2e-2)
