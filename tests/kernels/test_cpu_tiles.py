"""Block lists as the CPU kernels read them: blocks narrower and wider than a kernel tile, blocks
that share a tile, lists that differ by head; and what calls leave behind."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom import create_block_mask, flex_attention
from attnloom.backends.cpu import launch
from attnloom.stats import compile_stats
from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with, fresh_memory_is_nan
from tests.harness.threads import at_once

SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=700, D=16, Dv=24)
BLOCK_SIZES = [(16, 16), (16, 256), (128, 16), (32, 64), (64, 32), (128, 128), (256, 512)]


@pytest.mark.parametrize(
    ("mod", "block_size", "dtype"),
    [
        (mod, block_size, (torch.float32, torch.bfloat16)[(i + j) % 2])
        for i, mod in enumerate(("window_with_sinks", "dilated_by_head", "document"))
        for j, block_size in enumerate(BLOCK_SIZES)
    ],
    ids=str,
)
def test_block_sizes(mod: str, block_size: tuple[int, int], dtype: torch.dtype) -> None:
    check_attention(Case(mod, SIZES, dtype, block_size=block_size), attnloom_with(backend="cpu"))


def scattered(live: torch.Tensor, block_size: tuple[int, int]) -> attnloom.BlockMask:
    """A mask of live [Q_LEN, KV_LEN] tokens, read from a captured table."""

    def mask_mod(b, h, q_idx, kv_idx):
        return live[q_idx, kv_idx]

    shape = live.shape
    return create_block_mask(mask_mod, None, None, *shape, device="cpu", BLOCK_SIZE=block_size)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value


@pytest.mark.parametrize("key", [5, 140, 299])
@pytest.mark.parametrize("row", [0, 16, 39, 99])
def test_keys_that_one_row_reads_after_rows_without_any(row: int, key: int) -> None:
    """The list of a row block without keys begins where the next one's does, and was taken for it:
    keys that no other rows read were not packed, and a kernel read what its workspace held."""
    live = torch.zeros(100, 300, dtype=torch.bool)
    live[row, key] = True
    generator = torch.Generator().manual_seed(0)
    query, key_, value = (torch.randn(1, 2, n, 8, generator=generator) for n in (100, 300, 300))
    with fresh_memory_is_nan():
        out = flex_attention(query, key_, value, block_mask=scattered(live, (16, 16)))
    torch.testing.assert_close(out, dense(query, key_, value, live))


@pytest.mark.parametrize("block_size", [(16, 16), (64, 16), (16, 32), (128, 64)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_scattered_blocks(seed: int, block_size: tuple[int, int]) -> None:
    """Empty, full and partial blocks in random order, so that full ones share tiles with gaps."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = block_size
    kinds = torch.randint(0, 4, (20, 40), generator=generator)
    kinds = kinds.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:210, :333]
    live = (kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape, generator=generator) < 0.2))
    query, key, value = (
        torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (210, 333, 333)
    )
    found = flex_attention(query, key, value, block_mask=scattered(live, block_size))
    expected = dense(query, key, value, live)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    dout = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    leaves = (query, key, value)
    for mine, exact in zip(
        torch.autograd.grad(found, leaves, dout),
        torch.autograd.grad(expected, leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0, 37, 250])
def test_rows_of_a_longer_mask_see_its_positions(start: int) -> None:
    generator = torch.Generator().manual_seed(0)
    live = torch.rand(300, 300, generator=generator) < 0.3
    query, key = (torch.randn(1, 2, 300, 16, generator=generator) for _ in range(2))
    mask = scattered(live, (32, 64)).rows(start, start + 50)
    part = slice(start, start + 50)
    found = flex_attention(query[:, :, part], key, key, block_mask=mask)
    torch.testing.assert_close(found, dense(query[:, :, part], key, key, live[part]))


def test_large_captured_integers_are_computed_in_wide_lanes() -> None:
    """The narrow build reports them; the second run starts from clean gradients."""
    generator = torch.Generator().manual_seed(0)
    stamps = torch.arange(200) * (1 << 33)
    bias = torch.randn(3, generator=generator, requires_grad=True)
    query = torch.randn(1, 2, 200, 16, generator=generator, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[(stamps[q_idx] - stamps[kv_idx]) // (1 << 39)]

    def in_torch() -> torch.Tensor:
        at = (stamps[:, None] - stamps[None, :]) // (1 << 39)
        scores = query @ query.transpose(-2, -1) / 4 + bias[at.clamp(-3, 2)]
        return scores.softmax(-1) @ query

    dout = torch.randn(1, 2, 200, 16, generator=generator)
    for _ in range(2):
        found, expected = flex_attention(query, query, query, score_mod), in_torch()
        torch.testing.assert_close(found, expected)
        mine = torch.autograd.grad(found, (query, bias), dout)
        exact = torch.autograd.grad(expected, (query, bias), dout)
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


def test_sizes_and_numbers_never_compile_again() -> None:
    def run(length: int, width: int, offset: int, B: int) -> None:
        table = torch.zeros(width)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[q_idx - kv_idx + offset]

        query = torch.randn(B, 4, length, 24)
        flex_attention(query, query[:, :2], query[:, :2], score_mod, enable_gqa=True)

    run(100, 50, 3, 2)
    before = compile_stats().kernels_loaded
    run(257, 90, -8, 1)
    run(40, 1, 0, 3)
    assert compile_stats().kernels_loaded == before


def test_concurrent_calls_share_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 300 + 50 * i, 32, generator=generator) for i in range(4)]
    expected = [flex_attention(x, x, x) for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(flex_attention(inputs[i], inputs[i], inputs[i]), expected[i]):
                wrong.append(i)

    at_once(work, range(4))
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beyond_the_tensors_is_bounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4096 tokens, 8 heads of 64: 64 MiB for a forward and a backward together."""
    asked: list[int] = []
    fresh = launch._workspace

    def recorded(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return fresh(num_bytes)

    monkeypatch.setattr(launch, "_workspace", recorded)
    query = torch.randn(1, 8, 4096, 64).to(dtype).requires_grad_()
    causal = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4096, 4096, device="cpu")
    flex_attention(query, query, query, block_mask=causal).sum().backward()
    assert len(asked) == 2
    assert sum(asked) <= 64 << 20


@pytest.mark.parametrize("length", [5, 100], ids=["decode", "forward"])
def test_nan_stays_in_its_row(length: int) -> None:
    query, key = torch.randn(1, 2, length, 32), torch.randn(1, 2, 200, 32)
    clean = flex_attention(query, key, key)
    query[0, 1, 3, 7] = torch.nan
    found, aux = flex_attention(
        query, key, key, return_aux=attnloom.AuxRequest(lse=True, max_scores=True)
    )
    assert found[0, 1, 3].isnan().all()
    assert aux.lse[0, 1, 3].isnan()
    assert aux.max_scores[0, 1, 3].isnan()
    found[0, 1, 3] = clean[0, 1, 3]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("length", [5, 100], ids=["decode", "forward"])
def test_the_lowest_number_as_a_mask_leaves_hidden_rows_uniform(length: int) -> None:
    """As softmax has it; times log2(e) that number would be -inf and the row empty."""
    lowest = torch.finfo(torch.float32).min
    query, key = torch.randn(1, 1, length, 16), torch.randn(1, 1, 150, 16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx > 2) & (kv_idx < 100), score, lowest)

    found = flex_attention(query, key, key, score_mod)
    torch.testing.assert_close(found[0, 0, :3], key[0, 0].mean(0).expand(3, -1))
    torch.testing.assert_close(
        found[:, :, 3:], dense(query[:, :, 3:], key, key, torch.arange(150) < 100)
    )
