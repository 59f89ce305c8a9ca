"""Inputs that gave silently wrong numbers elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

import attnloom
from attnloom.backends.reference import reference_attention
from attnloom.errors import ShapeError
from tests.harness.agree import agrees, close, normal, qkv
from tests.harness.case import Case, draw_problem
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with, eager


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_case_001_two_calls_in_one_graph_with_lse() -> None:
    """Gradients and lse drifted when one graph called attention more than once and used lse."""
    q, k, v = qkv(1, 2, 70, 16)
    mask = attnloom.create_block_mask(causal, None, None, 70, 70)
    lse = attnloom.AuxRequest(lse=True)

    first, aux_1 = attnloom.flex_attention(q, k, v, block_mask=mask, return_aux=lse)
    second, aux_2 = attnloom.flex_attention(first, k, first, block_mask=mask, return_aux=lse)
    loss = (second * aux_1.lse[..., None]).sum() + (aux_2.lse**2).sum()

    exact_1, lse_1, _ = reference_attention(q, k, v, mask=causal)
    exact_2, lse_2, _ = reference_attention(exact_1, k, exact_1, mask=causal)
    expected = (exact_2 * lse_1[..., None]).sum() + (lse_2**2).sum()

    for mine, theirs in zip(
        torch.autograd.grad(loss, (q, k, v)), torch.autograd.grad(expected, (q, k, v)), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize("S", [128, 256])
@pytest.mark.parametrize("mod", ["plain", "causal"])
def test_case_002_float32_stays_float32(S: int, mod: str) -> None:
    """Matmul precision "high" gave large errors in float32 from S=256."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_attention(Case(mod, Sizes(1, 2, 2, S, S, 64, 64)), attnloom_with(), backward=S == 128)
    finally:
        torch.set_float32_matmul_precision(before)


def test_case_003_chunks_with_look_back() -> None:
    """A streaming mask (own chunk and a few before it) came out wrong at D=16."""

    def chunked(b, h, q_idx, kv_idx):
        return (kv_idx // 16 <= q_idx // 16) & (kv_idx // 16 >= q_idx // 16 - 2)

    agrees(*qkv(2, 4, 150, 16), mask_mod=chunked)


def test_case_004_bfloat16_scores_are_not_rounded() -> None:
    """Scores rounded to bfloat16 before the softmax are less accurate than they need be."""
    case = Case("bool_table_mask", Sizes(2, 4, 4, 128, 128, 64, 64), torch.bfloat16)
    problem = draw_problem(case)
    truth = reference_attention(problem.query, problem.key, problem.value, None, problem.mods[1])
    rounded_out, rounded_lse, _ = eager(problem)
    out, lse, _ = attnloom_with()(problem)
    assert (lse - truth.lse).abs().max() < 0.05 * (rounded_lse - truth.lse).abs().max()
    assert (out - truth.out).abs().mean() < 0.8 * (rounded_out - truth.out).abs().mean()


def test_case_006_mask_for_other_lengths_is_an_error() -> None:
    """A mask built for Q=128, KV=256 gave zeros for the second batch of S=2 inputs."""
    q, k, v = qkv(2, 2, 2, 16)
    mask = attnloom.create_block_mask(causal, 2, None, 128, 256)
    with pytest.raises(ShapeError, match=r"128.*256|256.*128"):
        attnloom.flex_attention(q, k, v, block_mask=mask)
    agrees(q, k, v, mask_mod=causal, block_mask=mask.crop(2, 2))


def test_case_007_long_mask_serves_shorter_inputs_by_crop() -> None:
    """One mask built at 8192 gave wrong results for inputs of 1024."""

    def stream(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 64) | (kv_idx < 4))

    mask = attnloom.create_block_mask(stream, None, None, 8192, 8192)
    q, k, v = qkv(1, 1, 1000, 16)
    with pytest.raises(ShapeError, match=r"crop\("):
        attnloom.flex_attention(q, k, v, block_mask=mask)
    agrees(q, k, v, mask_mod=stream, block_mask=mask.crop(1000, 1000))


def test_case_009_keys_beyond_the_valid_length_are_not_read() -> None:
    """Unwritten cache rows were attended to when the length was not a multiple of the block."""
    q, k, v = (x.detach() for x in qkv(1, 2, 3, 16, keys=64))
    k[:, :, 37:], v[:, :, 37:] = 1e4, math.nan
    valid = attnloom.flex_attention(q, k[:, :, :37], v[:, :, :37])
    expected, _, _ = reference_attention(q, k[:, :, :37], v[:, :, :37])
    close(valid, expected)


def test_case_011_document_mods_see_positions_inside_the_document() -> None:
    """On ragged input, per-sequence masks saw positions of the whole packed row."""
    cu = torch.tensor([0, 30, 30, 95, 100])
    mask = attnloom.BlockMask.from_cu_seqlens(cu, mask_mod=lambda b, h, q, kv: (q >= kv) & (q < 20))
    document = torch.repeat_interleave(torch.arange(4), cu.diff())
    local = torch.arange(100) - cu[document]
    expected = document[:, None] == document
    expected &= (local[:, None] >= local) & (local[:, None] < 20)
    assert torch.equal(mask.to_mask()[0, 0], expected)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_case_012_lse_is_the_natural_logarithm_everywhere(backend: str) -> None:
    """One backend returned lse off by a factor of ln 2."""
    q, k, v = (x.detach() for x in qkv(1, 2, 40, 16))
    _, aux = attnloom.flex_attention(
        q, k, v, return_aux=attnloom.AuxRequest(lse=True), kernel_options={"backend": backend}
    )
    close(aux.lse, torch.logsumexp(q @ k.mT / 4, -1))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=lambda g: g.__name__)
def test_case_013_lse_in_inference(guard) -> None:
    """lse was all zeros when no gradient was needed."""
    q, k, v = (x.detach() for x in qkv(2, 8, 128, 64, dtype=torch.bfloat16))
    with guard():
        _, aux = attnloom.flex_attention(
            q, k[:, :2], v[:, :2], enable_gqa=True, return_aux=attnloom.AuxRequest(lse=True)
        )
    _, lse, _ = reference_attention(q, k[:, :2], v[:, :2])
    torch.testing.assert_close(aux.lse, lse.float(), rtol=1e-4, atol=1e-4)


def test_case_014_captured_tensor_beyond_31_bits() -> None:
    """A table of more than 2^31 elements was addressed with 32 bits."""
    width = (1 << 29) + 64
    try:
        table = torch.empty(5, width, dtype=torch.bool)  # pages that are not touched cost nothing
    except RuntimeError as error:
        pytest.skip(f"no address space for the table: {error}")
    start = 1 << 29
    table[:, start:] = torch.rand(5, 64) < 0.5
    table[:, start] = True

    def mask_mod(b, h, q_idx, kv_idx):
        return table[q_idx, kv_idx + start]

    agrees(*qkv(1, 1, 5, 16, keys=64), mask_mod=mask_mod)
    small = table[:, start:].clone()
    q, k, v = qkv(1, 1, 5, 16, keys=64)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(table[q_idx, kv_idx + start], score, score - 3)

    out = attnloom.flex_attention(q, k, v, score_mod)
    expected, _, _ = reference_attention(
        q, k, v, lambda s, b, h, i, j: torch.where(small[i, j], s, s - 3)
    )
    close(out, expected)


def test_case_015_keys_in_a_pool_beyond_31_bits() -> None:
    """Offsets into a cache pool of more than 2^31 elements wrapped."""
    try:
        pool = torch.empty((1 << 31) + 4096, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for the pool: {error}")
    heads = pool.as_strided((1, 2, 40, 16), (0, (1 << 31) + 1000, 16, 1))
    heads.copy_(normal(1, 2, 40, 16, dtype=torch.float16, seed=1))
    agrees(normal(1, 2, 30, 16, dtype=torch.float16), heads, heads)


def test_case_017_attention_sink_by_lse() -> None:
    """A learned sink logit per head takes part in the denominator, gradient included."""
    q, k, v = qkv(1, 4, 60, 16)
    sink = normal(4).requires_grad_()
    mask = attnloom.create_block_mask(causal, None, None, 60, 60)
    out, aux = attnloom.flex_attention(
        q, k, v, block_mask=mask, return_aux=attnloom.AuxRequest(lse=True)
    )
    out = out * torch.sigmoid(aux.lse - sink[:, None])[..., None]
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(60, 60).tril().bool(), -math.inf)
    column = sink[:, None, None].expand(1, 4, 60, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    close(out, expected)
    weight = normal(*out.shape, seed=5)
    for mine, theirs in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v, sink)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v, sink)),
        strict=True,
    ):
        close(mine, theirs)


def test_case_018_left_padded_batch() -> None:
    """Rows of padding before a sequence must give zeros, and differ from batch row to batch row."""
    start = torch.tensor([0, 7, 40])

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx >= start[b])

    q, k, v = qkv(3, 2, 50, 16)
    agrees(q, k, v, mask_mod=mask_mod)
    mask = attnloom.create_block_mask(mask_mod, 3, None, 50, 50)
    out = attnloom.flex_attention(q, k, v, block_mask=mask)
    assert not out[1, :, :7].any()
    assert not out[2, :, :40].any()


def test_case_020_decode_offset_helper() -> None:
    """Q=1 against a long cache saw one key only; rows() carries the offset."""
    q, k, v = qkv(1, 2, 1, 16, keys=777)
    row = attnloom.create_block_mask(causal, None, None, 777, 777).rows(776, 777)
    agrees(q, k, v, mask_mod=lambda b, h, i, j: j <= 776, block_mask=row)


def test_case_021_dense_view_shows_tokens() -> None:
    """A dense view of blocks was taken for one of tokens; to_mask shows tokens."""
    mask = attnloom.create_block_mask(causal, None, None, 100, 100)
    assert torch.equal(mask.to_mask()[0, 0], torch.ones(100, 100).tril().bool())


def test_case_022_large_inputs_in_bfloat16() -> None:
    """Inputs ten times larger: no less accurate than torch's own attention."""
    q, k, v = (normal(1, 4, 240, 128, dtype=torch.bfloat16, seed=i) * 10 for i in range(3))
    truth = reference_attention(q, k, v).out
    mine = (attnloom.flex_attention(q, k, v) - truth).abs()
    sdpa = (torch.nn.functional.scaled_dot_product_attention(q, k, v) - truth).abs()
    assert mine.max() <= 1.5 * sdpa.max()
    assert mine.mean() <= 1.2 * sdpa.mean()


def test_case_010_nested_sequences_do_not_see_each_other() -> None:
    """Tokens of one jagged sequence attended to another when no mask was given."""
    parts = [normal(n, 2, 8, seed=n) for n in (5, 1, 9)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = attnloom.flex_attention(nested, nested, nested)
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        x = part.transpose(0, 1)[None]
        close(got.transpose(0, 1)[None], reference_attention(x, x, x).out)
