"""Inputs from training loops and servers that broke elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnloom
from attnloom.backends import registry
from attnloom.masking import build
from tests.harness.agree import agrees, close, normal, qkv
from tests.harness.memory import peak_growth


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


class Block(torch.nn.Module):
    """Projections around an attention whose mask is global."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.mask = attnloom.create_block_mask(causal, None, None, 50, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return attnloom.flex_attention(q, k, v, block_mask=self.mask)


def test_case_050_a_change_that_means_nothing(capsys: pytest.CaptureFixture) -> None:
    """A key error vanished when a print was added: the same result, the same kernel."""
    q, k, v = (x.detach() for x in qkv(1, 2, 60, 16))
    mask = attnloom.create_block_mask(causal, None, None, 60, 60)

    def silent(score, b, h, q_idx, kv_idx):
        return score * 0.5

    def chatty(score, b, h, q_idx, kv_idx):
        print("traced")
        return score * 0.5

    first = attnloom.flex_attention(q, k, v, silent, mask)
    before = attnloom.compile_stats().kernels_loaded
    assert torch.equal(attnloom.flex_attention(q, k, v, chatty, mask), first)
    assert attnloom.compile_stats().kernels_loaded == before
    assert "traced" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_case_054_head_dim_96_in_decode(dtype: torch.dtype) -> None:
    """Head dimension 96 failed in decode only."""
    agrees(*qkv(2, 2, 1, 96, keys=130, dtype=dtype))


def test_case_109_what_is_saved_for_the_backward() -> None:
    """More memory than FlashAttention: saved are inputs, out, lse and two numbers a row."""
    saved: list[torch.Tensor] = []
    q, k, v = qkv(1, 2, 400, 16)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = attnloom.flex_attention(q, k, v)
    numel = sum(t.numel() for t in saved)
    assert numel <= q.numel() + k.numel() + v.numel() + out.numel() + 3 * 2 * 400
    out.sum().backward()
    assert q.grad is not None


def test_cases_118_and_119_layers_alternate_masks_over_one_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page table was inverted into a mask each step, and layers had to share one mask."""
    masks = [attnloom.create_block_mask(mod, None, None, 64, 64) for mod in (causal, window)]
    monkeypatch.setattr(build, "classify", None)  # no step builds a mask
    cache = attnloom.PagedKVCache(
        num_pages=8, page_size=16, num_kv_heads=2, head_dim=16, num_layers=2
    )
    sequence = cache.new()
    keys = [normal(1, 2, 45, 16, seed=10 + n) for n in range(2)]
    values = [normal(1, 2, 45, 16, seed=20 + n) for n in range(2)]
    at = 0
    for count in (42, 1, 1, 1):
        batch = cache.extend([sequence], [count])
        new = slice(at, at + count)
        at += count
        for n, mod in enumerate((causal, window)):
            batch.write(keys[n][:, :, new], values[n][:, :, new], n)
            query = normal(1, 2, count, 16, seed=at)
            got = attnloom.flex_attention(query, batch.layer(n), block_mask=masks[n])
            rows, columns = torch.arange(at - count, at)[:, None], torch.arange(at)
            scores = query @ keys[n][:, :, :at].mT / 4
            scores = scores.masked_fill(~mod(0, 0, rows, columns), -float("inf"))
            close(got, scores.softmax(-1) @ values[n][:, :, :at])


def test_case_051_first_calls_are_quiet(capfd: pytest.CaptureFixture) -> None:
    """Autotuning printed tables and warnings when a shape was first met."""
    attnloom.flex_attention(*qkv(1, 2, 33, 16))  # what the process itself says once
    capfd.readouterr()
    before = attnloom.compile_stats().traces
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for S, D in ((1, 24), (130, 40)):
            q, k, v = qkv(1, 2, S, D, keys=130)
            attnloom.flex_attention(
                q, k, v, lambda s, b, h, i, j: s * 0.25 - j % 3
            ).sum().backward()
    assert attnloom.compile_stats().traces > before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="plain"), pytest.param(True, id="aot_eager", marks=pytest.mark.slow)],
)
def test_case_111_the_backward_has_a_kernel_of_its_own(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Inductor the backward was S x S eager operators, 10 to 30 times SDPA's time."""
    S = 1600
    backend = registry.load("cpu")
    calls: list[torch.Size] = []
    backward = type(backend).backward

    def counted(self, call, *rest):
        calls.append(call.query.shape)
        return backward(self, call, *rest)

    monkeypatch.setattr(type(backend), "backward", counted)
    bias = normal(2, seed=4).requires_grad_()
    inputs = [*qkv(1, 2, S, 16), bias]
    mask = attnloom.create_block_mask(causal, None, None, S, S)

    def loss(q, k, v, bias):
        def tilt(score, b, h, q_idx, kv_idx):
            return score + bias[h] * (kv_idx - q_idx) / S

        return attnloom.flex_attention(q, k, v, tilt, mask).square().sum()

    step = torch.compile(loss, backend="aot_eager") if compiled else loss
    step(*inputs).backward()  # loads kernels, and compiles what is around them
    with peak_growth() as peak:
        step(*inputs).backward()
    assert calls == [inputs[0].shape] * 2
    assert all(x.grad is not None for x in inputs)
    assert peak.bytes < S * S * 4  # one head's scores in float32


def test_case_121_distributed_data_parallel(tmp_path: Path) -> None:
    """Any DDP model failed under compile; here attention is an ordinary function."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        block, x = Block(), normal(2, 50, 32)
        block(x).square().sum().backward()
        expected = block.project.weight.grad
        block.zero_grad()
        torch.nn.parallel.DistributedDataParallel(block)(x).square().sum().backward()
        assert expected is not None and block.project.weight.grad is not None
        torch.testing.assert_close(block.project.weight.grad, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_case_124_checkpoint_under_compile() -> None:
    """A mask that a closure holds broke checkpointing inside a compiled model."""
    torch.manual_seed(0)
    block, x = Block(), normal(2, 50, 32).requires_grad_()
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False).square().sum()  # type: ignore[union-attr]

    (got,) = torch.autograd.grad(torch.compile(step, backend="eager")(x), x)
    torch.testing.assert_close(got, expected)


def test_cases_138_and_139_the_cpu_takes_what_a_gpu_takes() -> None:
    """Head sizes and lengths without a choice of kernel on the CPU; one API for every device."""
    for dtype in (torch.float32, torch.bfloat16):
        for D in (24, 160):
            mask = attnloom.create_block_mask(causal, None, None, 33, 33, device="cpu")
            agrees(*qkv(1, 2, 33, D, dtype=dtype), mask_mod=causal, block_mask=mask)
