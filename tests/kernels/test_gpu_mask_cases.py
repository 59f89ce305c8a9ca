"""Masks that ran out of memory, time or lengths elsewhere, built on a real GPU; `pytest -m gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import attnloom
from attnloom.masking.lists import TileGrid
from tests.kernels.mask_building import check_lists
from tests.kernels.test_gpu_masks import GPU, documents, waits
from tests.masks.mods import MaskMod

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)


def extra_bytes(action: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def square(mod: MaskMod, length: int) -> attnloom.BlockMask:
    return attnloom.create_block_mask(mod, None, None, length, length, device=GPU)


def test_case_049_neighbourhoods_in_three_dimensions() -> None:
    """Quotients and remainders: nearly no tile is decided by intervals alone."""
    side = 24

    def natten_3d(b, h, q_idx, kv_idx):
        x = (q_idx % side - kv_idx % side).abs() <= 3
        y = (q_idx // side % side - kv_idx // side % side).abs() <= 3
        return x & y & ((q_idx // side**2 - kv_idx // side**2).abs() <= 3)

    check_lists(natten_3d, TileGrid(1, 1, side**3, side**3, 128, 128), GPU)


@pytest.mark.parametrize("S", [96_000, 1 << 20, 1 << 24])
def test_case_064_builder_never_holds_the_dense_mask(S: int) -> None:
    """The longest has 2^34 tiles, which are decided coarse to fine."""
    assert extra_bytes(lambda: square(window, S)) < (1 << 10) * MIB
    per_row, blocks = 1024 // 128 + 1, S // 128
    live = square(window, S).lists().entries.numel()
    assert live == blocks * per_row - sum(range(per_row))


def test_case_065_ids_of_a_step() -> None:
    """512 x 512 flattened tokens with the documents of a step took 0.15 to 0.30 s a call."""
    mod = documents(512 * 512)
    square(mod, 512 * 512)
    torch.cuda.synchronize()
    start = time.perf_counter()
    square(mod, 512 * 512)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 0.02


def test_case_066_long_documents() -> None:
    """32 documents of 16 to 33 thousand tokens, from their ids, from their lengths."""
    lengths = torch.randint(16_000, 33_000, (32,), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(GPU)
    ids = torch.arange(32).repeat_interleave(lengths).to(GPU)
    from_ids = square(lambda b, h, q, kv: ids[q] == ids[kv], ids.numel()).lists()
    from_lengths = attnloom.BlockMask.from_cu_seqlens(cu).lists()
    assert torch.equal(from_ids.row_offsets, from_lengths.row_offsets)
    assert torch.equal(from_ids.entries, from_lengths.entries)


def test_case_070_other_documents_every_step() -> None:
    """Nothing is traced or compiled again, and the host waits once."""
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        ids = (torch.rand(5000, generator=generator) < 0.002).cumsum(0).to(GPU, non_blocking=True)
        square(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), 5000)

    step()
    before = attnloom.compile_stats()
    step()
    assert attnloom.compile_stats() == before
    ids = torch.arange(5000, device=GPU) // 70
    assert waits(lambda: square(lambda b, h, q, kv: ids[q] == ids[kv], 5000)) == 1
