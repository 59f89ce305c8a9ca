"""Consumers that pass over steps and tiles that are joined (gluon/forward_passed.py and
forward_joined.py) on a Hopper GPU: the same bits as without either, and right by all scores in
float64; `pytest -m gpu`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnloom import AuxRequest, create_block_mask, flex_attention
from attnloom.backends.gluon import configs_forward
from benchmarks.candidates import GluonForward
from tests.kernels.hopper import ON_HOPPER
from tests.kernels.test_gpu_gluon_edges import dense, inputs, kept

pytestmark = ON_HOPPER
OPTIONS: Any = {"backend": "gluon"}
DTYPES = (torch.bfloat16, torch.float16)
# Rows of the last tile of 192: 140, of two consumers and a part; 128; 8, of one; all.
LENGTHS = [(1100, 1300), (1280, 1280), (1160, 900), (960, 1024)]
TURNS, BARRIERS, ONE_BY_ONE = configs_forward.forms(64, 64, 128, plain=True)[:3]
NO_MASK = {D: configs_forward.forms(D, D, None, plain=True)[0] for D in (64, 96)}


def documents() -> Any:
    ids = (torch.arange(1300, device="cuda") // 170).to(torch.int32)
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def by_head() -> Any:
    widths = torch.tensor([100, 700, 0, 300], device="cuda")
    return lambda b, h, q, kv: (q >= kv) & (q - kv < widths[h])


def by_batch() -> Any:
    ends = torch.tensor([500, 90], device="cuda")
    return lambda b, h, q, kv: (kv < ends[b]) | (q >= kv)


MASKS: dict[str, Any] = {
    "causal": lambda: lambda b, h, q, kv: q >= kv,
    "window": lambda: lambda b, h, q, kv: (q >= kv) & (q - kv < 300),
    "sinks": lambda: lambda b, h, q, kv: (q >= kv) & ((q - kv < 300) | (kv < 4)),
    "later keys": lambda: lambda b, h, q, kv: kv > q + 150,
    "one block": lambda: lambda b, h, q, kv: q // 128 == kv // 128,
    "every second block": lambda: lambda b, h, q, kv: ((q // 128 + kv // 128) % 2 == 0) & (q >= kv),
    "rows without keys": lambda: lambda b, h, q, kv: (q >= kv + 130) & (q // 128 % 3 != 1),
}
LOOKING_UP: dict[str, Any] = {"documents": documents, "by head": by_head, "by batch": by_batch}


def run(
    form: Any, tensors: tuple[Any, Any, Any], blocks: Any, times: int = 1, score: Any = None
) -> list[Any]:
    """(out, lse, max_scores) of each launch."""
    found = []
    q, k, v = tensors
    request = AuxRequest(lse=True, max_scores=True)
    with GluonForward(form).installed():
        for _ in range(times):
            out, aux = flex_attention(
                q, k, v, score, block_mask=blocks, enable_gqa=True, kernel_options=OPTIONS,
                return_aux=request,
            )  # fmt: skip
            found.append((out, aux.lse, aux.max_scores))
    return found


def without(form: Any) -> Any:
    assert form.skips or form.joined
    return replace(form, skips=False, joined=False)


def check(form: Any, mask: Any, sizes: tuple[int, int], D: int, dtype: Any, block: Any) -> None:
    q, k, v, dout = (t.to(dtype) for t in inputs(*sizes, D, 1.0))
    blocks = None
    if mask is not None:
        blocks = create_block_mask(mask, 2, 4, *sizes, device="cuda", BLOCK_SIZE=block)
    first, *others = run(form, (q, k, v), blocks, times=5)
    for again in (*others, *run(without(form), (q, k, v), blocks)):
        for got, want in zip(again, first, strict=True):
            assert torch.equal(got, want)
    keep = kept(mask or (lambda b, h, q, kv: kv >= 0), 2, 4, *sizes)
    out, lse, *_ = dense(q, k, v, dout, keep)
    empty = ~keep.any(3)
    assert torch.equal(first[1] == -math.inf, empty)
    assert torch.equal(first[2] == -math.inf, empty)
    assert (first[0][empty] == 0).all()
    assert (first[0] - out).abs().max() < 0.02
    assert (first[1] - lse)[~empty].abs().max() < 2e-3


@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_in_turn(name: str, sizes: tuple[int, int]) -> None:
    check(TURNS, MASKS[name](), sizes, 64, DTYPES[LENGTHS.index(sizes) % 2], 128)


@pytest.mark.parametrize("name", MASKS)
def test_meeting_at_barriers(name: str) -> None:
    for sizes in LENGTHS[:2]:
        check(BARRIERS, MASKS[name](), sizes, 64, torch.float16, 128)


@pytest.mark.parametrize("name", [*MASKS, *LOOKING_UP])
def test_one_product_after_the_other(name: str) -> None:
    for sizes in LENGTHS[:2]:
        check(ONE_BY_ONE, (MASKS | LOOKING_UP)[name](), sizes, 64, torch.bfloat16, 128)


@pytest.mark.parametrize("block", [(64, 128), (256, 128), (128, 256)], ids=str)
def test_blocks(block: tuple[int, int]) -> None:
    """In blocks of two steps all of a tile is passed over or none."""
    for form in (TURNS, BARRIERS, ONE_BY_ONE):
        check(form, MASKS["window"](), LENGTHS[0], 64, torch.bfloat16, block)


@pytest.mark.parametrize("D", [64, 96])
@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
def test_without_a_mask(D: int, sizes: tuple[int, int]) -> None:
    check(NO_MASK[D], None, sizes, D, DTYPES[LENGTHS.index(sizes) % 2], 128)


@pytest.mark.parametrize("name", ["causal", "window", None])
def test_scores_that_grow_with_the_distance(name: str | None) -> None:
    """ALiBi's opposite, by three consumers one after the other: the bits are the same."""
    q, k, v, _ = inputs(1100, 1300, 64, 1.0)
    blocks = None
    if name is not None:
        blocks = create_block_mask(MASKS[name](), None, None, 1100, 1300, device="cuda")
    slopes = torch.tensor([0.1, 0.01, 0.5, 0.0], device="cuda")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + slopes[h] * (i - j)

    found = run(ONE_BY_ONE, (q, k, v), blocks, score=score)
    wanted = run(without(ONE_BY_ONE), (q, k, v), blocks, score=score)
    for got, want in zip(found[0], wanted[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["causal", "window", None])
def test_many_tiles(name: str | None) -> None:
    """Programs draw several each."""
    blocks = None
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(4, 16, 2120, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    if name is not None:
        blocks = create_block_mask(MASKS[name](), None, None, 2120, 2120, device="cuda")
    form = NO_MASK[64] if name is None else TURNS
    (wanted,) = run(without(form), (q, k, v), blocks)
    for found in run(form, (q, k, v), blocks, times=20):
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("KV_LEN", [1, 64, 128, 200, 512, 520, 600, 1000])
def test_joined_tiles(KV_LEN: int) -> None:
    """Of one step and of several, the last of which is a part: five have the part where a tag that
    is read late lies."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(4, heads, length, 64, generator=draw, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((16, 2120), (4, KV_LEN), (4, KV_LEN))
    )
    (wanted,) = run(without(NO_MASK[64]), (q, k, v), None)
    for found in run(NO_MASK[64], (q, k, v), None, times=20):
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("form", [TURNS, NO_MASK[64]], ids=["window", "no mask"])
def test_in_a_graph(form: Any) -> None:
    q, k, v, _ = inputs(1100, 1300, 64, 1.0)
    blocks = None
    if form is TURNS:
        blocks = create_block_mask(MASKS["window"](), None, None, 1100, 1300, device="cuda")
    ((want, _, _),) = run(form, (q, k, v), blocks)
    change = GluonForward(form)
    with change.installed():
        flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=OPTIONS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = flex_attention(
                q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=OPTIONS
            )
    for _ in range(3):
        got.fill_(math.nan)
        graph.replay()
        assert torch.equal(got, want)
