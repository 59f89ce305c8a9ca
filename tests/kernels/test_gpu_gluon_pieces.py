"""Captured elements of single scores, moved 16 bytes a thread (gluon/pieces.py), on a Hopper GPU
against the oracle; `pytest -m gpu`. A form may wait for a barrier that never comes: each test is a
process that can be given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.harness.case import Case
from tests.harness.check import check_attention
from tests.harness.draw import Sizes
from tests.harness.implementations import attnloom_with
from tests.kernels.apart import apart
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=300, KV_LEN=400, D=64, Dv=64)

pytestmark = ON_HOPPER


@contextlib.contextmanager
def in_pieces(way: str) -> Iterator[None]:
    """Inside, captured elements of single scores are moved 16 bytes a thread. way: of WAYS."""
    from attnloom.backends.gluon import launch_forward, ready_backward

    in_order, form_of = launch_forward._in_order, ready_backward.form_of
    found = {"pieces": True, "lines": "lines" in way, "prefetch": "ahead" in way}
    backward_found = found | {"streamed": "streamed" in way}
    # forms that look nothing up ahead, and stay as they are otherwise
    forward_found = found | ({"skips": False, "joined": False} if found["prefetch"] else {})

    def forward_forms(call, fixed):
        return tuple(replace(form, **forward_found) for form in in_order(call, fixed))

    def backward_form(operands):
        return replace(form_of(operands), **backward_found)

    with (
        mock.patch.object(launch_forward, "_ready", {}),
        mock.patch.object(launch_forward, "_in_order", forward_forms),
        mock.patch.object(ready_backward, "_ready", {}),
        mock.patch.object(ready_backward, "form_of", backward_form),
    ):
        yield


# Those in use: forward at D=64, at D=128, and backward at D=64.
WAYS = ["pieces", "lines ahead", "lines streamed ahead"]
# whole tiles; rows of whole pieces that end inside a tile; rows that start anywhere
LENGTHS = [(512, 512), (300, 400), (150, 290)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mod", ["full_bias", "pair_bias"])
def test_captured_elements_in_pieces(mod: str, head_dim: int, way: str) -> None:
    apart(pieces, mod, head_dim, way)


def pieces(mod: str, head_dim: int, way: str) -> None:
    """Both phases, heads in groups and alone; the backward of wider heads looks up lane by lane."""
    from tests.kernels.gluon_backward import check_gradients

    with in_pieces(way):
        for (q_len, kv_len), dtype in zip(LENGTHS, (BF16, FP16, BF16), strict=True):
            sizes = replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len, D=head_dim, Dv=head_dim)
            case = Case(mod, sizes, dtype, block_size=128)
            check_attention(case, attnloom_with("cuda", backend="gluon"), backward=False)
            if head_dim == 64:
                check_gradients(case)
        if head_dim == 64:
            check_gradients(replace(case, sizes=replace(sizes, Hkv=4, KV_LEN=400)))


# lines of 8 bytes an element take more shared memory than there is beside the tiles
_ELEMENTS = [(way, dtype) for way in WAYS for dtype in (torch.float32, BF16, torch.bool)]


@pytest.mark.parametrize(("way", "dtype"), [*_ELEMENTS, ("pieces", torch.int64)], ids=str)
def test_elements_of_every_size_in_pieces(dtype: torch.dtype, way: str) -> None:
    apart(elements, dtype, way)


def elements(dtype: torch.dtype, way: str) -> None:
    """A factor and a sum, whose gradients need the elements again; causal, with lists of blocks;
    tables with padded rows, shared by the batch, and with a head for two."""
    import attnloom
    from tests.kernels.gluon_backward import gluon_alone

    draw = torch.Generator(device="cuda").manual_seed(3)
    heads, q_len, kv_len = 4, 320, 416
    padded = torch.randn(1, heads // 2, q_len, kv_len + 16, generator=draw, device="cuda")
    table = (padded > 0 if dtype == torch.bool else 4 * padded).to(dtype)[..., :kv_len]
    q, k, v = (
        torch.randn(2, heads, n, 64, generator=draw, device="cuda").to(BF16).requires_grad_()
        for n in (q_len, kv_len, kv_len)
    )

    def score_mod(score, b, h, q_idx, kv_idx):
        found = table[0, h // 2, q_idx, kv_idx]
        return score * (1 + found * 0.25) + found

    mask = attnloom.create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx + 96 >= kv_idx, None, None, q_len, kv_len, "cuda"
    )
    results = []
    for backend in ("gluon", "reference"):
        with in_pieces(way), gluon_alone():
            options = {"backend": backend}
            out = attnloom.flex_attention(q, k, v, score_mod, mask, kernel_options=options)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        results.append((out, *gradients))
    for mine, expected in zip(*results, strict=True):
        difference = (mine.double() - expected.double()).norm()
        assert difference < 2e-2 * expected.double().norm()
