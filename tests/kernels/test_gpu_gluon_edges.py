"""Masks with edges (backends/gluon/emit_mask.py) in the Gluon kernels of a Hopper GPU, forward and
backward, against all scores in float64; `pytest -m gpu`.

Queries and keys of zeros make lse the logarithm of the number of keys that a row keeps, which one
key too many or too few moves by more than any rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnloom import AuxRequest, create_block_mask, flex_attention
from tests.kernels import edge_masks
from tests.kernels.edge_masks import NAMED
from tests.kernels.hopper import ON_HOPPER

pytestmark = ON_HOPPER
OPTIONS: Any = {"backend": "gluon"}
# 300 queries on 420 keys end within tiles; blocks of 128 under tiles of 192 are kept apart (D=64).
SHAPES = [(300, 420, 64), (300, 420, 128), (512, 384, 96), (300, 420, 192)]


@pytest.fixture(autouse=True)
def _captured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in list(vars(edge_masks).items()):
        if isinstance(value, torch.Tensor):
            monkeypatch.setattr(edge_masks, name, value.cuda())
    yield


def kept(mask: Any, B: int, H: int, q_len: int, kv_len: int, offset: int = 0) -> torch.Tensor:
    b = torch.arange(B, device="cuda")[:, None, None, None]
    h = torch.arange(H, device="cuda")[None, :, None, None]
    q = torch.arange(q_len, device="cuda")[None, None, :, None] + offset
    kv = torch.arange(kv_len, device="cuda")[None, None, None, :]
    return mask(b, h, q, kv).expand(B, H, q_len, kv_len)


def inputs(q_len: int, kv_len: int, D: int, scale: float) -> list[torch.Tensor]:
    """Four query heads on two key heads."""
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = ((2, 4, q_len, D), (2, 2, kv_len, D), (2, 2, kv_len, D), (2, 4, q_len, D))
    q, k, v, dout = (
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for shape in shapes
    )
    return [q * scale, k * scale, v, dout]


def dense(q, k, v, dout, keep) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv)."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    scores = (q @ wide[0].mT / math.sqrt(q.size(3))).masked_fill(~keep, -math.inf)
    empty = ~keep.any(3, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), 3).masked_fill(empty, 0)
    out = weights @ wide[1]
    out.backward(dout.double())
    lse = torch.logsumexp(scores, 3)
    return out, lse, *(t.grad for t in (q, k, v))


def compare(mask: Any, q_len: int, kv_len: int, D: int, offset: int = 0) -> None:
    """offset: of the first query."""
    blocks = create_block_mask(mask, 2, 4, offset + q_len, kv_len, device="cuda", BLOCK_SIZE=128)
    if offset:
        blocks = blocks.rows(offset, offset + q_len)
    keep = kept(mask, 2, 4, q_len, kv_len, offset)
    for scale in (0.0, 1.0):
        q, k, v, dout = inputs(q_len, kv_len, D, scale)
        leaves = tuple(t.requires_grad_() for t in (q, k, v))
        aux = AuxRequest(lse=True, max_scores=True)
        out, found = flex_attention(
            q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=OPTIONS, return_aux=aux
        )
        grads = torch.autograd.grad(out, leaves, dout)
        wanted = dense(q.detach(), k.detach(), v.detach(), dout, keep)
        lse = wanted[1].float()
        assert found.lse is not None
        assert torch.equal(found.lse == -math.inf, lse == -math.inf)
        assert torch.equal(found.max_scores == -math.inf, lse == -math.inf)
        live = lse != -math.inf
        error = (found.lse - lse)[live].abs().max() if live.any() else torch.tensor(0.0)
        assert error < (1e-4 if scale == 0 else 2e-3), error
        for name, got, want in zip(
            ("out", "dq", "dk", "dv"), (out, *grads), (wanted[0], *wanted[2:]), strict=True
        ):
            limit = 0.03 * float(want.abs().max()) + 1e-3
            error = (got.double() - want).abs().max()
            assert error <= limit, (name, scale, float(error), limit)


@pytest.mark.parametrize("name", NAMED)
def test_masks(name: str) -> None:
    compare(NAMED[name], *SHAPES[sorted(NAMED).index(name) % 2])


@pytest.mark.parametrize(("q_len", "kv_len", "D"), SHAPES)
@pytest.mark.parametrize("name", ["window", "sinks", "prefix", "both sides", "documents", "far"])
def test_shapes(name: str, q_len: int, kv_len: int, D: int) -> None:
    compare(NAMED[name], q_len, kv_len, D)


@pytest.mark.parametrize("seed", range(20))
def test_random(seed: int) -> None:
    compare(edge_masks.random_mask(seed), *SHAPES[seed % 2])


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", ["causal", "window", "sinks", "negative", "ends of queries"])
def test_offsets(name: str, D: int) -> None:
    compare(NAMED[name], 300, 420, D, 110)


@pytest.mark.parametrize("window", [1, 64, 2**31 - 1, -(2**31), 0, -3])
def test_a_window_is_a_number(window: int) -> None:
    """One kernel for all of them."""
    compare(lambda b, h, q, kv: (q >= kv) & (q - kv < window), 300, 420, 64)


SCORES = {
    "nothing": lambda s, b, h, q, kv: torch.where(q % 3 == 0, -math.inf, s),
    "least": lambda s, b, h, q, kv: torch.where(q % 3 == 0, torch.finfo(torch.float32).min, s),
    "far below": lambda s, b, h, q, kv: torch.where(q % 3 == 0, s - 1e31, s),
    "late": lambda s, b, h, q, kv: torch.where(kv < 200, -math.inf, s),
    "highest": lambda s, b, h, q, kv: torch.where(q % 3 == 0, 3e38, s),
}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", SCORES)
def test_rows_whose_scores_are_lowest(name: str, D: int) -> None:
    """Maxima begin at the least finite number (FLOOR in forward_math.py)."""
    q, k, v, _ = inputs(300, 420, D, 1.0)
    mask = NAMED["causal"]
    blocks = create_block_mask(mask, None, None, 300, 420, device="cuda", BLOCK_SIZE=128)
    aux = AuxRequest(lse=True, max_scores=True)
    out, found = flex_attention(
        q, k, v, SCORES[name], block_mask=blocks, enable_gqa=True, kernel_options=OPTIONS,
        return_aux=aux,
    )  # fmt: skip
    b, h, rows, columns = (torch.arange(n, device="cuda") for n in (2, 4, 300, 420))
    scores = (q.float() @ k.float().repeat_interleave(2, 1).mT) / math.sqrt(D)
    scores = SCORES[name](
        scores, b[:, None, None, None], h[:, None, None], rows[:, None], columns
    ).masked_fill(~kept(mask, 2, 4, 300, 420), -math.inf)
    highest = scores.amax(3)
    empty = highest == -math.inf
    weights = torch.softmax(scores.double(), 3).nan_to_num(nan=0.0)
    want = weights @ v.double().repeat_interleave(2, 1)
    assert torch.equal(found.max_scores == -math.inf, empty)
    assert torch.equal(found.lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(found.max_scores, highest, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.03)


@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("first", ["early keys", "late keys"])
def test_a_low_number_that_is_added_hides_keys(first: str, low: float, D: int) -> None:
    """In whole tiles of a row, the first it meets among them, it was NaN in what followed."""
    dtype = torch.float16 if low == -1e9 else torch.bfloat16
    q, k, v, dout = (t.to(dtype) for t in inputs(300, 420, D, 1.0))
    rows, columns = torch.arange(300, device="cuda")[:, None], torch.arange(420, device="cuda")
    keep = rows + 5 >= columns if first == "late keys" else rows <= columns
    added = torch.zeros(300, 420, device="cuda").masked_fill(~keep, low)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, aux = flex_attention(
        *leaves, lambda s, b, h, i, j: s + added[i, j], enable_gqa=True, kernel_options=OPTIONS,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    found = (out, aux.lse, *torch.autograd.grad(out, leaves, dout))
    wanted = dense(*(t.detach() for t in leaves), dout, keep[None, None])
    for mine, theirs in zip(found, wanted, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 2e-2, float(error)
