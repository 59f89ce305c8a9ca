"""Launches on a real GPU: graphs, streams, threads, devices, limits, offsets, compiles."""

from __future__ import annotations

import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import attnloom
from attnloom.backends.triton import (
    configs,
    configs_backward,
    launch_decode,
    launch_forward,
    ready_backward,
)
from attnloom.backends.triton.configs import Tile
from attnloom.errors import UnsupportedError
from tests.harness.agree import agrees, close, normal, qkv
from tests.harness.threads import at_once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16 = torch.float32, torch.bfloat16
TRITON = {"backend": "triton"}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _tensors_on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.fixture
def much_memory() -> Iterator[None]:
    """For tests of tens of gigabytes."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip(f"{free >> 30} GiB are free, 40 are needed")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def assert_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """Within 2% of the largest element, however small that is."""
    error, size = (float(x.abs().max()) for x in (one - other, other))
    assert size > 0, "nothing to compare"
    assert error <= 0.02 * size, f"{error:.3g} of {size:.3g}"


def attention(S: int, backend: str = "triton") -> Callable[[Inputs], torch.Tensor]:
    """A causal call with ALiBi that is ready to be repeated."""
    slopes = 0.5 ** torch.arange(1, 5)
    mask = attnloom.create_block_mask(causal, None, None, S, S, device="cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return lambda x: attnloom.flex_attention(
        *x, score_mod, mask, kernel_options={"backend": backend}
    )


def gradients(call: Callable[[Inputs], torch.Tensor], x: Inputs) -> list[torch.Tensor]:
    out = call(x)
    return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]


@pytest.mark.parametrize(
    ("backend", "deterministic"), [("triton", False), ("triton", True), ("auto", False)]
)
def test_forward_and_backward_in_a_cuda_graph(backend: str, deterministic: bool) -> None:
    """Case 117: a captured call once overwrote its output, or faulted."""
    table = normal(4, 400).requires_grad_()
    mask = attnloom.create_block_mask(causal, None, None, 200, 200, device="cuda")
    x = qkv(2, 4, 200, 64, dtype=BF16)
    dout = normal(2, 4, 200, 64, dtype=BF16, seed=9)

    def step() -> tuple[torch.Tensor, ...]:
        out = attnloom.flex_attention(
            *x, lambda s, b, h, i, j: s + table[h, i - j + 200], mask,
            kernel_options={"deterministic": deterministic, "backend": backend},
        )  # fmt: skip
        return out, *torch.autograd.grad(out, (*x, table), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (10, 20):
        with torch.no_grad():
            for n, tensor in enumerate(x):
                tensor.copy_(normal(*tensor.shape, seed=seed + n))
        graph.replay()
        for mine, theirs in zip(captured, step(), strict=True):
            close(mine, theirs, BF16)


def test_decode_in_a_cuda_graph() -> None:
    """Split keys, the merging kernel, and lengths that a mask reads from memory."""
    length = torch.tensor([700], dtype=torch.int32)
    mask = attnloom.create_block_mask(
        lambda b, h, i, j: j < length[0], None, None, 1, 2048, device="cuda"
    )
    whole = attnloom.create_block_mask(lambda b, h, i, j: j >= 0, None, None, 1, 2048, "cuda")
    x = tuple(t.detach() for t in qkv(2, 4, 1, 128, keys=2048, dtype=BF16))
    call = functools.partial(attnloom.flex_attention, *x, kernel_options=TRITON)
    for one in (mask, whole):
        call(block_mask=one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call(), call(block_mask=mask), call(block_mask=whole)]
    x[0].copy_(normal(2, 4, 1, 128, seed=5))
    graph.replay()
    for mine, theirs in zip(
        captured, (call(), call(block_mask=mask), call(block_mask=whole)), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_split_keys_repeat() -> None:
    """The same bits at every launch, in graphs and on streams beside each other too."""
    x = tuple(t.detach() for t in qkv(1, 8, 1, 128, keys=20_000, dtype=BF16))
    call = functools.partial(attnloom.flex_attention, *x, kernel_options=TRITON)
    first = call()
    for _ in range(50):
        assert torch.equal(call(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            other = call()
        mine = call()
        torch.cuda.synchronize()
        assert torch.equal(mine, first)
        assert torch.equal(other, first)
        assert torch.equal(captured, first)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_lists_derived_while_capturing_are_not_kept(backend: str) -> None:
    """A graph's memory holds nothing before its first replay."""
    call = attention(300, backend)
    x = tuple(t.detach() for t in qkv(1, 4, 300, 64, dtype=BF16))
    call(x)
    fresh = attention(300, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fresh(x)
    eager = fresh(x)
    assert torch.equal(eager, call(x))
    graph.replay()
    assert torch.equal(captured, eager)


def test_streams_and_threads() -> None:
    """Six threads, each with a stream and a length of its own, start with nothing prepared."""
    inputs = {S: qkv(1, 4, S, 64, dtype=BF16) for S in (70, 128, 200, 333, 512, 640)}
    found: dict[int, list[torch.Tensor]] = {}
    calls = {S: attention(S) for S in inputs}
    torch.cuda.synchronize()

    def work(S: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found[S] = gradients(calls[S], inputs[S])
            torch.cuda.current_stream().synchronize()

    at_once(work, list(inputs))
    for S, x in inputs.items():
        for mine, theirs in zip(found[S], gradients(calls[S], x), strict=True):
            assert torch.equal(mine, theirs), f"length {S}"


def test_a_thread_that_has_not_used_the_device() -> None:
    """The driver knows no context there before torch's first call of the runtime."""
    x = tuple(t.detach() for t in qkv(1, 4, 300, 64, dtype=BF16))
    call = attention(300)
    expected = call(x)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(call(x)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_in_one_process() -> None:
    """Case 37: launches went to the current device, wherever the tensors were."""
    x = qkv(1, 4, 200, 64, dtype=BF16)
    first = gradients(attention(200), x)
    with torch.device("cuda:1"):
        mask = attnloom.create_block_mask(causal, None, None, 200, 200, device="cuda:1")
        slopes = 0.5 ** torch.arange(1, 5)
    there = tuple(t.detach().to("cuda:1").requires_grad_() for t in x)
    second = gradients(
        lambda y: attnloom.flex_attention(*y, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask),
        there,
    )
    assert torch.cuda.current_device() == 0
    for mine, theirs in zip(second, first, strict=True):
        assert mine.device == torch.device("cuda:1")
        assert torch.equal(mine.to("cuda:0"), theirs)


HUGE = Tile(64, 64, 4, 12)  # twelve stages of 32 KiB


@pytest.mark.parametrize("phase", ["forward", "decode", "backward"])
def test_a_tile_that_does_not_fit_is_passed_over(phase: str) -> None:
    """Cases 40 to 42: the error for too much shared memory reached the user."""
    Q = 1 if phase == "decode" else 260
    x = qkv(1, 4, Q, 128, keys=256, dtype=BF16)
    tables = {
        "forward": (configs, "forward_tiles", launch_forward),
        "decode": (configs, "decode_tiles", launch_decode),
        "backward": (configs_backward, "key_tiles", ready_backward),
    }
    module, name, launches = tables[phase]
    usual = getattr(module, name)
    seen: list[int] = []

    def with_a_huge_one(*args):
        seen.append(1)
        return (HUGE, *usual(*args))

    call = functools.partial(attnloom.flex_attention, *x, scale=0.11, kernel_options=TRITON)
    # a problem that was seen keeps its tile: the backward's of another phase of this test
    nothing_seen = mock.patch.dict(launches._ready, clear=True)
    with nothing_seen, mock.patch.object(module, name, with_a_huge_one):
        mine = torch.autograd.grad(call().sum(), x)
    assert seen
    for one, other in zip(mine, torch.autograd.grad(call().sum(), x), strict=True):
        close(one, other, BF16)


def test_when_no_tile_fits_the_error_says_so() -> None:
    x = tuple(t.detach() for t in qkv(1, 4, 260, 128, dtype=BF16))
    with (
        mock.patch.dict(launch_forward._ready, clear=True),
        mock.patch.object(configs, "forward_tiles", lambda *_: (HUGE,)),
        pytest.raises(UnsupportedError, match="fits the device"),
    ):
        attnloom.flex_attention(*x, scale=0.12, kernel_options=TRITON)


@pytest.mark.parametrize(("D", "dtype"), [(512, BF16), (256, FP32)], ids=str)
def test_wide_heads_fit(D: int, dtype: torch.dtype) -> None:
    """Cases 42 to 44: wide heads ran out of shared memory, or failed inside the compiler."""
    agrees(*qkv(1, 1, 70, D, dtype=dtype), mask_mod=causal)


def test_head_dim_1024_runs_on_tiled_operators() -> None:
    with pytest.warns(UserWarning, match="1024"):
        agrees(*qkv(1, 1, 40, 1024), mask_mod=causal)


def test_a_table_beyond_31_bits(much_memory: None) -> None:
    """Case 14: a [Sq, Skv] table read by the mask and by the score, past 46,340 tokens."""
    S = 46_500
    table = torch.empty(S, S, dtype=torch.int8)
    for rows in table.split(4096):
        rows.random_(0, 2)
    table[:, 0] = 1
    x = tuple(t.detach() for t in qkv(1, 1, S, 16, dtype=BF16))
    mask = attnloom.create_block_mask(
        lambda b, h, i, j: (table[i, j] != 0) & (i >= j), None, None, S, S, device="cuda"
    )
    out, aux = attnloom.flex_attention(
        *x, lambda s, b, h, i, j: s + table[j, i], mask, kernel_options=TRITON,
        return_aux=attnloom.AuxRequest(lse=True),
    )  # fmt: skip
    last = slice(S - 100, S)
    q, k, v = (t[0, 0].double() for t in x)
    live = (table[last] != 0) & (torch.arange(S)[last, None] >= torch.arange(S))
    scores = (q[last] @ k.T / 4 + table[:, last].T).masked_fill(~live, -math.inf)
    assert_alike(out[0, 0, last].double(), scores.softmax(-1) @ v)
    close(aux.lse[0, 0, last], scores.logsumexp(-1), FP32)


def test_a_bias_beyond_31_bits_and_its_gradient(much_memory: None) -> None:
    """Case 34: a trained bias of 2**31 elements and more; the last head lies past them."""
    H, S = 33, 8192
    bias = torch.zeros(H, S, S, dtype=BF16)
    bias[-1].normal_()
    bias.requires_grad_()
    x = qkv(1, H, S, 16, dtype=BF16)
    call = functools.partial(attnloom.flex_attention, kernel_options=TRITON)
    out = call(*x, lambda s, b, h, i, j: s + bias[h, i, j])
    grads = torch.autograd.grad(out, (*x, bias), torch.ones_like(out))
    own = bias[-1].detach().clone().requires_grad_()
    y = tuple(t[:, -1:].detach().clone().requires_grad_() for t in x)
    alone = call(*y, lambda s, b, h, i, j: s + own[i, j])
    expected = torch.autograd.grad(alone, (*y, own), torch.ones_like(alone))
    assert_alike(out[:, -1:], alone)
    for mine, theirs in zip(grads[:3], expected[:3], strict=True):
        assert_alike(mine[:, -1:], theirs)
    assert_alike(grads[3][-1], expected[3])


@pytest.mark.parametrize(("backend", "Q"), [("triton", 3), ("triton", 200), ("auto", 200)])
def test_keys_beyond_31_bits(backend: str, Q: int, much_memory: None) -> None:
    """Case 15: the offset of a key, in decode and in both directions of a prefill."""
    H, S, D = 65, 1 << 18, 128
    shape = (1, H, S, D)
    k, v = (torch.zeros(shape, dtype=BF16) for _ in range(2))
    k[:, -1].normal_()
    v[:, -1].normal_()
    q = 4 * normal(1, H, Q, D, dtype=BF16)  # few keys take most of a row
    x = [t.requires_grad_(Q > 64) for t in (q, k, v)]
    call = functools.partial(attnloom.flex_attention, kernel_options={"backend": backend})
    out = call(*x)
    y = [t[:, -1:].detach().clone().requires_grad_(Q > 64) for t in x]
    alone = call(*y)
    assert_alike(out[:, -1:], alone)
    if Q > 64:
        mine = torch.autograd.grad(out, x, torch.ones_like(out))
        theirs = torch.autograd.grad(alone, y, torch.ones_like(alone))
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one[:, -1:], other)


@pytest.mark.parametrize("block", [128, 1024])
def test_case_028_and_029_long_sequences(block: int) -> None:
    """Faults at 93,696 tokens with large blocks under a mask of the query alone, and at 25,600
    under a union of four index masks."""
    S = 93_696 if block == 1024 else 25_600
    memory, window = 600, 1024

    def by_query(b, h, i, j):
        return i % 50 == 0

    def union(b, h, i, j):
        q_mem, kv_mem = i < memory, j < memory
        near = ((i - j).abs() <= window) & ~q_mem & ~kv_mem
        own = q_mem & (j // 10 == i // 10)
        read = ~q_mem & kv_mem & (j % 7 == (i // 50) % 7)
        return near | own | read | (q_mem & ~kv_mem & ((j - memory) // 90 == i % 12))

    mask_mod = by_query if block == 1024 else union
    x = qkv(1, 1, S, 128, dtype=BF16)
    mask = attnloom.create_block_mask(mask_mod, None, None, S, S, "cuda", BLOCK_SIZE=block)
    out = attnloom.flex_attention(*x, block_mask=mask, kernel_options=TRITON)
    rows = torch.arange(0, S, 997)
    q, k, v = (t[0, 0].detach().double() for t in x)
    live = mask_mod(None, None, rows[:, None], torch.arange(S))
    live = live.expand(len(rows), S)
    scores = (q[rows] @ k.T / math.sqrt(128)).masked_fill(~live, -math.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    assert_alike(out[0, 0, rows].double(), expected)
    grads = torch.autograd.grad(out, x, torch.ones_like(out))
    assert all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize(("precision", "times"), [("tf32", 8), ("tf32x3", 2), ("ieee", 2)])
@pytest.mark.parametrize("S", [128, 256])
def test_case_002_float32_precision_is_what_was_asked_for(
    S: int, precision: str, times: int
) -> None:
    """Errors of "high" precision came uncalled for; here they are asked for and bounded. The
    matrix units cut what tf32 leaves out, cuBLAS rounds it, hence `times`."""
    x = tuple(t.detach() for t in qkv(1, 2, S, 64))
    exact = (x[0].double() @ x[1].double().mT / 8).softmax(-1) @ x[2].double()
    out = attnloom.flex_attention(*x, kernel_options={"fp32_precision": precision} | TRITON)
    allow = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        rough = (x[0] @ x[1].mT / 8).softmax(-1) @ x[2]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow
    error, peer = (float((t - exact).abs().max()) for t in (out, rough))
    assert error <= times * peer + 1e-6
