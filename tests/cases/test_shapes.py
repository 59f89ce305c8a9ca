"""Head dimensions, groups, lengths and block sizes that were refused or wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

import attnloom
from attnloom.errors import AttnloomError
from tests.harness.agree import agrees, normal, qkv


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.mark.slow
def test_case_043_head_dim_1024_in_float32() -> None:
    """A head dimension of 1024 failed inside the compiler."""
    agrees(*qkv(1, 1, 20, 1024), mask_mod=causal)


@pytest.mark.slow
def test_case_044_head_dim_512_in_bfloat16() -> None:
    """A head dimension of 512 was practically unsupported."""
    agrees(*qkv(1, 1, 40, 512, dtype=torch.bfloat16), mask_mod=causal)


def test_case_045_document_ids_for_32_batches() -> None:
    """Captured int64 document ids [32, 1024] left no valid configuration."""
    ids = torch.randint(0, 4, (32, 100)).sort(-1).values
    agrees(*qkv(32, 1, 100, 16), mask_mod=lambda b, h, i, j: ids[b, i] == ids[b, j])


@pytest.mark.parametrize("S", [1, 3, 20])
def test_case_046_training_with_short_queries(S: int) -> None:
    """Short queries in training were sent to a decode kernel that could not run them."""
    agrees(*qkv(2, 4, S, 16, keys=200))


def test_case_047_bfloat16_training_at_head_dim_128() -> None:
    """B1 H8 S256 D128 in bfloat16 failed to compile."""
    agrees(*qkv(1, 2, 256, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("D", [31, 72, 80, 96])
def test_case_053_head_dims_that_are_no_power_of_two(D: int) -> None:
    """Refused on the GPU, and partly in eager mode."""
    agrees(*qkv(1, 2, 40, D), mask_mod=causal)


@pytest.mark.parametrize("D", [8, 16])
def test_case_055_small_head_dims(D: int) -> None:
    """Head dimensions below 32 were not to be trusted."""
    agrees(*qkv(2, 2, 100, D), mask_mod=causal)


@pytest.mark.parametrize("Dv", [32, 128])
def test_case_056_value_dim_differs(Dv: int) -> None:
    """The output had the shape of the query when Dv was not D."""
    q, k, _ = qkv(2, 4, 64, 64)
    v = normal(2, 4, 64, Dv, seed=7).requires_grad_()
    assert attnloom.flex_attention(q, k, v).shape == (2, 4, 64, Dv)
    agrees(q, k, v)


def test_case_058_short_grouped_queries() -> None:
    """Q=100 with two query heads a key head had no kernel."""
    q, _, _ = qkv(1, 4, 100, 16)
    _, k, v = qkv(1, 2, 100, 16)
    agrees(q, k, v, mask_mod=causal)


@pytest.mark.parametrize(("S", "keys"), [(300, 300), (300, 77), (129, 513)])
def test_case_060_lengths_that_are_no_multiple_of_128(S: int, keys: int) -> None:
    """Lengths had to be below 128 or a multiple of it; cross-attention more so."""
    agrees(*qkv(1, 2, S, 16, keys=keys), mask_mod=lambda b, h, i, j: (i + j) % 3 != 0)


@pytest.mark.parametrize("S", range(1, 11))
def test_case_061_tiny_lengths(S: int) -> None:
    """S from 4 to 10 failed in a model."""
    agrees(*qkv(2, 2, S, 16), mask_mod=causal)


@pytest.mark.parametrize("block", [16, 32, 64, 256, (32, 128), (256, 16)], ids=str)
def test_case_062_block_sizes(block: int | tuple[int, int]) -> None:
    """Any power of two from 16 is a block size."""
    mask = attnloom.create_block_mask(causal, None, None, 200, 200, BLOCK_SIZE=block)
    agrees(*qkv(1, 1, 200, 16), mask_mod=causal, block_mask=mask)


@pytest.mark.parametrize("block", [0, -16, 8, 100, (128, 20)], ids=str)
def test_case_062_impossible_block_sizes_are_refused_at_once(block) -> None:
    """What is no block size is named before any work."""
    with pytest.raises(AttnloomError, match="BLOCK_SIZE"):
        attnloom.create_block_mask(causal, None, None, 200, 200, BLOCK_SIZE=block)
