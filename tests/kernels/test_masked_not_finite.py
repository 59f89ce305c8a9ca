"""NaN and infinity in rows of keys and values reach the queries that see them, and no other, on
the CPU: output and gradients are those of the same call with such rows cleared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attnloom import PagedKV, PageTable, create_block_mask, flex_attention
from tests.harness.agree import close, normal
from tests.kernels.test_cpu_targets import on_x86, target  # noqa: F401  a fixture

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
S, H = 300, 2
ONE, PADDING = 150, 210  # a key that later queries see; keys from here on are seen by nobody


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx < PADDING)


@dataclass(frozen=True)
class Call:
    """Causal queries, which see key ONE from ONE on. score: whether a learned
    bias and a learned temperature take part."""

    queries: int = 200
    head_dim: int = 33
    value_dim: int = 40
    dtype: torch.dtype = FP32
    block_size: int = 128
    score: bool = False

    def run(self, spoil: dict[str, float], keys: list[int], clear: bool) -> list[torch.Tensor]:
        """out, dq, dk, dv and gradients of what is captured, for a loss of queries below ONE.

        Args:
            spoil: what these keys hold, by name of the input; `clear` puts 0 there instead.
        """
        shapes = {
            "query": (1, H, self.queries, self.head_dim),
            "key": (1, H, S, self.head_dim),
            "value": (1, H, S, self.value_dim),
        }
        inputs = {n: normal(*shapes[n], dtype=self.dtype, seed=len(n)) for n in shapes}
        for name, bad in spoil.items():
            inputs[name][:, :, keys] = 0.0 if clear else bad
        leaves = [x.requires_grad_() for x in inputs.values()]
        score_mod = None
        if self.score:
            table, heat = torch.zeros(S, requires_grad=True), torch.ones(H, requires_grad=True)
            leaves += [table, heat]
            score_mod = lambda s, b, h, q, k: s * heat[h] + table[k]
        mask = create_block_mask(
            mask_mod, None, None, self.queries, S, "cpu", BLOCK_SIZE=self.block_size
        )
        out = flex_attention(*leaves[:3], score_mod, mask, kernel_options={"backend": "cpu"})
        loss = out[:, :, :ONE].float().sin().sum()
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    def check(self, spoil: dict[str, float]) -> None:
        padding = list(range(PADDING, S))
        found, expected = (self.run(spoil, padding, clear) for clear in (False, True))
        for mine, wanted in zip(found, expected, strict=True):
            assert wanted.isfinite().all()
            close(mine, wanted)
        assert not any(d[:, :, PADDING:].any() for d in found[2:4])
        found, expected = (self.run(spoil, [ONE, *padding], clear) for clear in (False, True))
        assert not found[0][:, :, ONE:].isfinite().all(-1).any()
        for mine, wanted in zip(found[:2], expected[:2], strict=True):  # out and dq
            close(mine[:, :, :ONE], wanted[:, :, :ONE])


SPOILT = {
    "key": {"key": NAN},
    "infinite key": {"key": INF},
    "value": {"value": NAN},
    "infinite value": {"value": -INF},
    "both": {"key": NAN, "value": INF},
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("spoil", SPOILT)
def test_only_those_that_see_it(spoil: str, dtype: torch.dtype) -> None:
    Call(dtype=dtype).check(SPOILT[spoil])


@pytest.mark.parametrize("spoil", ["key", "infinite value"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 96), (1, 7)])
def test_rows_that_are_read_in_place(spoil: str, dims: tuple[int, int]) -> None:
    for dtype in (FP32, BF16):
        Call(head_dim=dims[0], value_dim=dims[1], dtype=dtype).check(SPOILT[spoil])


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_block_sizes(block_size: int) -> None:
    """Blocks narrower than a tile share it, wider ones are visited in parts."""
    for dtype in (FP32, BF16):
        Call(block_size=block_size, dtype=dtype).check(SPOILT["both"])


@pytest.mark.parametrize("spoil", SPOILT)
def test_captured_gradients(spoil: str) -> None:
    Call(score=True).check(SPOILT[spoil])


@on_x86
@pytest.mark.slow
@pytest.mark.parametrize("target", ["vectors", "avx2", "sse2"], indirect=True)
@pytest.mark.usefixtures("target")
def test_other_instruction_sets() -> None:
    for dtype in (FP32, BF16):
        Call(dtype=dtype).check(SPOILT["both"])


def few_queries(
    heads: int, queries: int, dtype: torch.dtype, clear: bool, page_size: int | None
) -> torch.Tensor:
    """Query 1, if there is one, sees keys 130 to 139, which are spoilt; 690 and later are seen by
    none."""
    q = normal(1, heads, queries, 40, dtype=dtype, seed=0)
    k, v = (normal(1, 2, 704, n, dtype=dtype, seed=n) for n in (40, 64))
    k[:, :, 130:140] = v[:, :, 130:140] = v[:, :, 690:] = 0.0 if clear else NAN

    def mask_mod(b, h, q_idx, kv_idx):
        spoilt = (kv_idx >= 130) & (kv_idx < 140)
        return (~spoilt | (q_idx == 705 - queries)) & (kv_idx < 690)

    options: dict[str, Any] = {"enable_gqa": True, "kernel_options": {"backend": "cpu"}}
    if page_size is None:
        shifted = lambda b, h, q, k: mask_mod(b, h, q + 704 - queries, k)
        mask = create_block_mask(shifted, None, None, queries, 704, "cpu")
        return flex_attention(q, k, v, block_mask=mask, **options)
    mask = create_block_mask(mask_mod, None, None, 704, 704, "cpu")
    pages = [x[0].unflatten(1, (-1, page_size)).transpose(0, 1).contiguous() for x in (k, v)]
    table = torch.arange(704 // page_size, dtype=torch.int32)[None]
    lengths = torch.tensor([704], dtype=torch.int32)
    kv = PagedKV(*pages, PageTable(lengths, None, table, page_size, 704))
    return flex_attention(q, kv, block_mask=mask, **options)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("heads", "queries"), [(2, 1), (8, 1), (2, 3), (2, 40)])
def test_decode(heads: int, queries: int, dtype: torch.dtype, page_size: int | None) -> None:
    found, expected = (few_queries(heads, queries, dtype, c, page_size) for c in (False, True))
    assert expected.isfinite().all()
    unseen = [i for i in range(queries) if i != 1]
    close(found[:, :, unseen], expected[:, :, unseen])
    assert not found[:, :, 1:2].isfinite().any()
