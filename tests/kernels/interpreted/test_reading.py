"""The kernel of the benchmarks that only reads: all of both tensors, in either order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.gpu_paged import _in_pages
from benchmarks.gpu_reading import reading

B, HKV, L = 2, 3, 512
WORDS = 4096  # of each tensor a program


def words_of(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Sums over what each program reads, of exclusive ors of keys' and values' words."""
    words = [x.reshape(-1, WORDS * 2).view(torch.int32).numpy() for x in (key, value)]
    return torch.from_numpy((words[0] ^ words[1]).sum(1, dtype=np.int64))


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (32, 64), (64, 128), (256, 128)])
def test_all_words_are_read_once(page_size: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(page_size)
    shape = (B, HKV, L, head_dim)
    key, value = (torch.randn(shape, generator=draw).to(torch.bfloat16) for _ in range(2))
    places = torch.randperm(B * L // page_size, generator=draw)
    pages = places.int().view(B, -1)
    keys, values = (_in_pages(x, places, page_size) for x in (key, value))
    expected = words_of(key, value)
    assert torch.equal(reading(key, value)(), expected)
    assert torch.equal(reading(keys, values, pages)(), expected)
