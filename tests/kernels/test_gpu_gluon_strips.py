"""Steps of 96 keys in the Gluon forward of a Hopper GPU, against the oracle; `pytest -m gpu`. Each
test is a process that can be given up: a barrier may never come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.harness.case import Case
from tests.harness.draw import Sizes
from tests.kernels.apart import apart
from tests.kernels.hopper import ON_HOPPER

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = Sizes(B=2, Hq=4, Hkv=2, Q_LEN=900, KV_LEN=1100, D=192, Dv=192)
OPTIONS: Any = {"backend": "gluon"}

pytestmark = ON_HOPPER


@contextlib.contextmanager
def strips(wanted: bool = True) -> Iterator[None]:
    """Inside, launches are of this form, or none is."""
    from attnloom.api import near, repeats
    from attnloom.backends.gluon import launch_forward

    near.clear()
    repeats.clear()
    with (
        mock.patch.object(launch_forward, "_ready", {}),
        mock.patch.object(launch_forward, "wants_short_steps", lambda call: False),
    ):
        yield
        found = [*launch_forward._ready.values()]
        assert found
        assert all(not isinstance(r, str) and r.form.strips == wanted for r in found), found


def check(case: Case) -> None:
    from tests.harness.check import check_attention
    from tests.harness.implementations import attnloom_with

    case = replace(case, block_size=case.block_size if case.block_size != 32 else 128)
    with strips():
        check_attention(case, attnloom_with("cuda", **OPTIONS), backward=False)


MODS = ["plain", "causal", "sliding_window", "window_with_sinks", "every_second_row", "nothing"]


def check_mod(mod: str) -> None:
    """Heads in groups, blocks of several sizes, and keys that end within a step or with one."""
    for dtype, block in ((BF16, 128), (FP16, (128, 64)), (BF16, (256, 256))):
        check(Case(mod, SIZES, dtype, block_size=block))
    check(Case(mod, replace(SIZES, KV_LEN=960), FP16))
    check(Case(mod, replace(SIZES, Hq=6, Hkv=1, Q_LEN=1024, KV_LEN=1024), BF16))


@pytest.mark.parametrize("mod", MODS)
def test_mods(mod: str) -> None:
    apart(check_mod, mod)


def check_shapes() -> None:
    """Other widths and lengths, strided inputs, keys of one batch entry, other scales."""
    for D, Dv in ((168, 192), (176, 168), (192, 184)):
        for mod in ("plain", "causal"):
            check(Case(mod, replace(SIZES, D=D, Dv=Dv), FP16 if D == 176 else BF16))
    lengths = [(1, 1), (1, 63), (63, 1), (64, 128), (129, 257), (17, 1000), (1000, 17), (193, 129)]
    for q_len, kv_len in lengths:
        for mod in ("plain", "sliding_window"):
            check(Case(mod, replace(SIZES, Q_LEN=q_len, KV_LEN=kv_len), BF16))
    check(Case("causal", SIZES, BF16, layout="transposed"))
    check(Case("causal", replace(SIZES, B=3), BF16, kv_batch=1))
    for scale in (0.0, 1.0, -0.3):
        check(Case("causal", SIZES, BF16, scale=scale))
        check(Case("plain", SIZES, FP16, scale=scale))
    for magnitude in (5.0, 30.0):
        check(Case("causal", SIZES, BF16, magnitude=magnitude))


def test_shapes() -> None:
    apart(check_shapes, limit=200.0)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(heads: int, length: int, batch: int = 2) -> Inputs:
    draw = torch.Generator("cuda").manual_seed(0)
    shape = batch, heads, length, 192
    q, k, v = (torch.randn(shape, generator=draw, device="cuda", dtype=BF16) for _ in range(3))
    return q, k, v


def dense(x: Inputs, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scores, -inf where they are hidden)."""
    q, k, v = (t.double() for t in x)
    scores = q @ k.mT * 192**-0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores


def by_batch_and_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((q - kv < 150 * (h + 1)) | (kv < 5 + 200 * b)) & (q > 40)


def kept(mask: Callable[..., Any], heads: int, length: int) -> torch.Tensor:
    sizes = 2, heads, length, length
    b, h, q, kv = torch.meshgrid(*(torch.arange(n, device="cuda") for n in sizes), indexing="ij")
    return mask(b, h, q, kv)


def check_statistics() -> None:
    """lse and maxima, with and without a mask; rows without keys have -inf."""
    from attnloom import AuxRequest, create_block_mask, flex_attention

    x = drawn(4, 900)
    blocks = create_block_mask(by_batch_and_head, 2, 4, 900, 900, device="cuda")
    request = AuxRequest(lse=True, max_scores=True)
    for block_mask, keep in ((None, None), (blocks, kept(by_batch_and_head, 4, 900))):
        with strips():
            out, aux = flex_attention(
                *x, block_mask=block_mask, return_aux=request, kernel_options=OPTIONS
            )
        wanted, scores = dense(x, keep)
        assert (out.double() - wanted).abs().max() < 2e-2
        assert aux.lse is not None and aux.max_scores is not None
        for mine, theirs in ((aux.lse, scores.logsumexp(-1)), (aux.max_scores, scores.amax(-1))):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-4)


def check_chosen() -> None:
    """Lists that do not follow from the mask_mod keep the forms before."""
    from attnloom import BlockMask, flex_attention

    length = 1024
    x = drawn(2, length)
    place = torch.arange(8, device="cuda")
    kind = (place[:, None] + 2 * place) % 3  # 0 dead, 1 partial, 2 full
    rows, keys = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    of_block = kind[rows // 128, keys // 128]
    mask_mod = lambda b, h, q, kv: (q + kv) % 3 != 0
    mask = BlockMask.from_block_bool(kind != 0, kind == 2, 128, mask_mod, (length, length))
    with strips(False):
        out = flex_attention(*x, block_mask=mask, kernel_options=OPTIONS)
    keep = (of_block == 2) | (of_block == 1) & ((rows + keys) % 3 != 0)
    assert (out.double() - dense(x, keep)[0]).abs().max() < 2e-2


def check_parts() -> None:
    """Rows of a mask, whose positions are offset."""
    from attnloom import create_block_mask, flex_attention

    q, k, v = drawn(4, 1000)
    blocks = create_block_mask(by_batch_and_head, 2, 4, 1000, 1000, device="cuda")
    keep = kept(by_batch_and_head, 4, 1000)
    for first, last in ((256, 900), (640, 1000)):
        rows = q[:, :, first:last].contiguous()
        with strips():
            out = flex_attention(
                rows, k, v, block_mask=blocks.rows(first, last), kernel_options=OPTIONS
            )
        wanted = dense((rows, k, v), keep[:, :, first:last])[0]
        assert (out.double() - wanted).abs().max() < 2e-2


def test_statistics_chosen_lists_and_parts() -> None:
    apart(check_statistics)
    apart(check_chosen)
    apart(check_parts)


def check_repeats() -> None:
    """The same bits each time, with many tiles a program, on two streams at once and in a graph
    that derives the lists of its mask."""
    from attnloom import create_block_mask, flex_attention

    x = drawn(16, 1500, batch=4)
    causal = lambda b, h, q, kv: q >= kv
    blocks = create_block_mask(causal, None, None, 1500, 1500, device="cuda")
    for block_mask in (None, blocks):
        run = lambda m=block_mask: flex_attention(*x, block_mask=m, kernel_options=OPTIONS)
        with strips():
            first = run()
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for i in range(8):
            with torch.cuda.stream(streams[i % 2]):
                results.append(run())
        torch.cuda.synchronize()
        fresh = None
        if block_mask is not None:  # whose lists are derived in the graph
            fresh = create_block_mask(causal, None, None, 1500, 1500, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = flex_attention(*x, block_mask=fresh, kernel_options=OPTIONS)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            results.append(captured.clone())
        for result in results:
            assert torch.equal(result, first)


def test_repeats() -> None:
    apart(check_repeats)


def check_gives_way() -> None:
    """As if strips had spilled: results are those of the form that follows."""
    from attnloom import create_block_mask, flex_attention
    from attnloom.backends.gluon import launch_forward

    x = drawn(4, 900)
    blocks = create_block_mask(by_batch_and_head, 2, 4, 900, 900, device="cuda")
    in_order = launch_forward._in_order
    following = lambda call, fixed: in_order(call, fixed)[1:]
    with strips(False), mock.patch.object(launch_forward, "_in_order", following):
        out = flex_attention(*x, block_mask=blocks, kernel_options=OPTIONS)
    with strips():
        mine = flex_attention(*x, block_mask=blocks, kernel_options=OPTIONS)
    assert (out.double() - mine.double()).abs().max() < 2e-2


def test_the_form_that_follows_gives_the_same() -> None:
    apart(check_gives_way)
