"""Inputs that gave NaN, or illegal memory accesses, elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

import attnloom
from attnloom.backends.reference import reference_attention
from attnloom.errors import ShapeError
from tests.harness.agree import agrees, close, normal, qkv


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("S", [1, 2, 17, 32])
def test_case_025_small_sequences_have_gradients(S: int, dtype: torch.dtype) -> None:
    """D=64 with at most 32 tokens gave NaN gradients under a correct forward."""
    agrees(*qkv(1, 2, S, 64, dtype=dtype))


def test_case_026_padding_by_query_position() -> None:
    """A mask that hides whole query rows: out 0, lse -inf, gradient 0."""
    q, k, v = qkv(2, 2, 90, 16)
    mask = attnloom.create_block_mask(lambda b, h, i, j: i < 50, None, None, 90, 90)
    out, aux = attnloom.flex_attention(
        q, k, v, block_mask=mask, return_aux=attnloom.AuxRequest(lse=True)
    )
    assert not out[:, :, 50:].any()
    assert (aux.lse[:, :, 50:] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + aux.lse[:, :, :50].sum(), (q, k, v))
    assert not dq[:, :, 50:].any()
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i < 50)


def test_case_028_blocks_of_1024() -> None:
    """Blocks of 1024 x 1024 under a mask of the query position alone."""
    q, k, v = qkv(1, 1, 1500, 16)

    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx % 3 != 0

    mask = attnloom.create_block_mask(mask_mod, None, None, 1500, 1500, BLOCK_SIZE=1024)
    agrees(q, k, v, mask_mod=mask_mod, block_mask=mask)


def test_case_029_union_of_four_index_masks() -> None:
    """Memory tokens and main tokens with a window: faults depended on a constant in the mask."""
    memory, window = 100, 128

    def mask_mod(b, h, q_idx, kv_idx):
        q_mem, kv_mem = q_idx < memory, kv_idx < memory
        near = ((q_idx - kv_idx).abs() <= window) & ~q_mem & ~kv_mem
        own = q_mem & (kv_idx // 10 == q_idx // 10)
        read = ~q_mem & kv_mem & (kv_idx % 7 == (q_idx // 50) % 7)
        write = q_mem & ~kv_mem & ((kv_idx - memory) // 90 == q_idx % 12)
        return near | own | read | write

    agrees(*qkv(1, 1, 900, 16), mask_mod=mask_mod)


def test_case_031_out_of_range_index_is_clamped() -> None:
    """A relative bias shorter than the range of its index must not read past its end."""
    table = normal(2, 65).requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + 32]  # in range within a band of 32 only

    def band(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 32

    agrees(*qkv(1, 2, 100, 16), score_mod, band, captures=[table])
    out = attnloom.flex_attention(*qkv(1, 2, 100, 16), score_mod)
    assert torch.isfinite(out).all()


def test_case_031_debug_mode_names_the_tensor() -> None:
    """The same index in debug mode is an error that names the tensor."""
    short_table = normal(20)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + short_table[kv_idx]

    with pytest.raises(ShapeError, match=r"short_table.*kv_idx=20"):
        attnloom.flex_attention(
            *qkv(1, 1, 64, 16), score_mod, kernel_options={"debug_bounds": True}
        )


def test_case_032_few_queries_and_very_many_keys() -> None:
    """Plain causal with small Q and very large KV."""
    q, k, v = (x.detach() for x in qkv(1, 1, 5, 16, keys=60_000))
    shift = 60_000 - 5
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i + shift >= j)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i >= j)


def test_case_034_full_bias_with_gradient() -> None:
    """A captured bias [B, H, Q, KV] that needs a gradient, as a leaf and as a computed tensor."""
    leaf = normal(2, 2, 80, 70, seed=4).requires_grad_()
    for bias in (leaf, leaf * 2.0):

        def score_mod(score, b, h, q_idx, kv_idx, bias=bias):
            return score + bias[b, h, q_idx, kv_idx]

        agrees(*qkv(2, 2, 80, 16, keys=70), score_mod, captures=[leaf])


def test_case_036_unused_mask_of_another_length() -> None:
    """Building a mask that is never used broke training at another length."""
    attnloom.create_block_mask(lambda b, h, i, j: i >= j, None, None, 712, 712)
    agrees(*qkv(1, 1, 1478, 16), mask_mod=lambda b, h, i, j: i >= j)


def test_case_038_document_table_without_padding() -> None:
    """A table of document ids exactly as long as the sequence, which is no multiple of a block."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([40, 1, 80, 16]))
    agrees(*qkv(1, 2, 137, 16), mask_mod=lambda b, h, i, j: ids[i] == ids[j])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_case_039_permuted_strides(order: tuple[int, ...]) -> None:
    """Every operand in another memory order."""
    back = [order.index(i) for i in range(4)]
    q, k, v = (
        x.detach().permute(order).contiguous().permute(back).requires_grad_()
        for x in qkv(2, 3, 50, 16)
    )
    assert tuple(q.shape) == (2, 3, 50, 16)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: i >= j)


def test_masked_keys_hold_anything() -> None:
    """Keys that the mask hides in whole tiles may be uninitialised memory."""
    q, k, v = (x.detach() for x in qkv(1, 2, 64, 16, keys=256))
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    mask = attnloom.create_block_mask(lambda b, h, i, j: j < 128, None, None, 64, 256)
    out = attnloom.flex_attention(q, k, v, block_mask=mask)
    close(out, reference_attention(q, k[:, :, :128], v[:, :, :128]).out)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("what", ["value", "key"])
def test_masked_keys_of_a_live_tile_reach_no_further_than_the_dense_formula(
    backend: str, what: str
) -> None:
    """0 times NaN is NaN: how far it goes depends on tiles, within these bounds."""
    q, k, v = (x.detach() for x in qkv(1, 2, 96, 16))
    {"key": k, "value": v}[what][:, :, 50] = math.nan
    mask = attnloom.create_block_mask(lambda b, h, i, j: i >= j, None, None, 96, 96, BLOCK_SIZE=16)
    out = attnloom.flex_attention(q, k, v, block_mask=mask, kernel_options={"backend": backend})  # type: ignore[arg-type]
    reached = out.isnan().any(-1)[0, 0]
    assert reached[50:].all()
    if backend == "cpu":
        assert not reached[:50].any()
    # Rows before the tile of 16 rows that holds row 50 read no tile that holds key 50.
    before = {"key": 50, "value": 48}[what] if backend != "reference" or what == "key" else 0
    assert not reached[:before].any()
