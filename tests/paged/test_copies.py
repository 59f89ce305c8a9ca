"""Caches and batches that were pickled or copied: read and written as the first ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from attnloom import PagedBatch, PagedKVCache, flex_attention
from attnloom.errors import OptionError

T = TypeVar("T")
H, D = 2, 8
COPIES: dict[str, Callable[[object], object]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(params=COPIES)
def copied(request: pytest.FixtureRequest) -> Callable[[T], T]:
    return COPIES[request.param]  # type: ignore[return-value]


def rows(n: int, seed: int) -> torch.Tensor:
    return torch.randn(1, H, n, D, generator=torch.Generator().manual_seed(seed))


def cache_of_twenty() -> PagedKVCache:
    cache = PagedKVCache(8, 16, H, D)
    cache.append([cache.new()], rows(20, 0), rows(20, 1))
    return cache


def test_a_pickled_cache_wrote_to_one_memory_and_read_from_another(
    copied: Callable[[PagedKVCache], PagedKVCache],
) -> None:
    cache = cache_of_twenty()
    outs = []
    for each in (cache, copied(cache)):
        batch = each.append([0], rows(3, 2), rows(3, 3))
        outs.append(flex_attention(rows(3, 4), batch.layer()))
        fork = each.fork(0)
        each.append([fork], rows(1, 5), rows(1, 6))
        each.move_tokens([(fork, 22, 23)])
        outs.append(flex_attention(rows(1, 7), each.batch([fork]).layer()))
    for first, second in zip(outs[:2], outs[2:], strict=True):
        assert torch.equal(first, second)


def test_a_copy_is_apart(copied: Callable[[PagedKVCache], PagedKVCache]) -> None:
    cache = cache_of_twenty()
    other = copied(cache)
    before = flex_attention(rows(1, 2), cache.batch().layer())
    other.keys[0].fill_(9.0)
    other.truncate(0, 3)
    assert torch.equal(flex_attention(rows(1, 2), cache.batch().layer()), before)


def test_a_copied_batch_took_updates_to_no_tensor(
    copied: Callable[[PagedBatch], PagedBatch],
) -> None:
    cache = cache_of_twenty()
    batch = cache.empty_batch(1, 64)
    batch.update([0], [1])
    cache.extend([0], 1)  # the batch stays what it was
    other = copied(batch)
    out = flex_attention(rows(1, 2), batch.layer())
    assert other.sequences == (0,) and other.table.lengths.tolist() == [20]
    assert torch.equal(flex_attention(rows(1, 2), other.layer()), out)
    for each in (batch, other):
        each.cache.append([0], rows(2, 3), rows(2, 4))
        each.update([0], [1])
    assert other.positions.tolist() == [[22]] and other.table.lengths.tolist() == [23]
    other.cache.truncate(0, 5)
    batch.layer()
    with pytest.raises(OptionError, match="old pages of sequence 0"):
        other.layer()


def test_a_batch_with_old_pages_could_not_be_copied(
    copied: Callable[[PagedBatch], PagedBatch],
) -> None:
    """It refuses as the first one does, until it is updated; also where its sequence is gone."""
    for lose in (lambda c: c.truncate(0, 3), lambda c: c.free(0)):
        cache = cache_of_twenty()
        batch = cache.batch([0])
        lose(cache)
        other = copied(copied(batch))
        for each in (batch, other):
            with pytest.raises(OptionError, match="old pages of sequence 0"):
                each.layer()
        new = other.cache.new()
        other.cache.append([new], rows(3, 2), rows(3, 3))
        other.update([new], [1])
        assert flex_attention(rows(1, 4), other.layer()).isfinite().all()


def test_a_shallow_copy_of_a_batch_with_old_pages() -> None:
    cache = cache_of_twenty()
    batch = cache.batch([0])
    cache.truncate(0, 3)
    other = copy.copy(batch)
    assert other.cache is cache
    with pytest.raises(OptionError, match="old pages of sequence 0"):
        other.write(rows(1, 0), rows(1, 1))
