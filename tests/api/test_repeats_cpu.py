"""Repeated calls on the CPU, which keep the arguments of their kernel: other addresses alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnloom import PagedKVCache, create_block_mask, flex_attention, mods
from attnloom.api import near, repeats
from attnloom.api.prepared import PreparedAttention
from attnloom.backends.cpu.again import ForwardAgain
from attnloom.backends.cpu.toolchain import available
from tests.harness.threads import at_once

pytestmark = pytest.mark.skipif(available() is None, reason="needs a C++ compiler")

CAUSAL = create_block_mask(mods.causal_mask, None, None, 200, 200)
HALVES = torch.bfloat16


def inputs(seed: int, dtype: torch.dtype = torch.float32, q_len: int = 200) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 2, q_len, 32), (1, 2, 200, 32), (1, 2, 200, 32)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """An entry for each call that was asked to be short: whether it was."""
    monkeypatch.setattr(repeats, "_buckets", {})
    monkeypatch.setattr(near, "_calls", {})
    monkeypatch.setattr(repeats, "_met", set())
    asked: list[bool] = []
    call = ForwardAgain.__call__

    def counting(self: ForwardAgain, *given: torch.Tensor) -> object:
        result = call(self, *given)  # type: ignore[arg-type]
        asked.append(result is not None)
        return result

    monkeypatch.setattr(ForwardAgain, "__call__", counting)
    yield asked


CALLS: dict[str, Callable[..., object]] = {
    "full": lambda q, k, v: flex_attention(q, k, v),
    "causal": lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL),
    "softcap": lambda q, k, v: flex_attention(q, k, v, mods.softcap(20.0), CAUSAL),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_give_what_first_ones_do(
    name: str, dtype: torch.dtype, short: list[bool]
) -> None:
    call = CALLS[name]
    with torch.no_grad():
        repeated = [call(*inputs(seed, dtype)) for seed in range(5)]
        assert any(short)
        for seed in range(5):
            repeats.clear()
            assert torch.equal(call(*inputs(seed, dtype)), repeated[seed])  # type: ignore[arg-type]


def test_decode_and_every_result(short: list[bool]) -> None:
    results = []
    for seed in (0, 1, 2, 3, 0):
        q, k, v = inputs(seed, q_len=1)
        results.append(flex_attention(q, k, v, return_aux=mods_aux()))
    assert any(short)
    (first, aux), *_, (last, last_aux) = results
    assert torch.equal(first, last) and not torch.equal(first, results[1][0])
    assert torch.equal(aux.lse, last_aux.lse) and torch.equal(aux.max_scores, last_aux.max_scores)


def mods_aux() -> object:
    from attnloom import AuxRequest

    return AuxRequest(lse=True, max_scores=True)


def test_threads_that_share_a_call_do_not_share_its_arguments() -> None:
    given = [inputs(seed) for seed in range(4)]
    with torch.no_grad():
        want = [flex_attention(*one, block_mask=CAUSAL) for one in given]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(60):
                out = flex_attention(*given[i], block_mask=CAUSAL)
                if not torch.equal(out, want[i]):
                    wrong.append(i)

    at_once(work, range(4))
    assert not wrong


def prepared() -> tuple[PreparedAttention, PagedKVCache, object, torch.Tensor]:
    cache = PagedKVCache(16, 16, 2, 32, num_layers=2)
    sequences = [cache.new() for _ in range(3)]
    cache.extend(sequences, [40, 3, 17])
    for stored in (*cache.keys, *cache.values):
        stored.copy_(torch.randn(stored.shape))
    batch = cache.empty_batch(3, 64)
    batch.update(sequences, [1, 1, 1])
    query = torch.randn(3, 4, 1, 32)
    return PreparedAttention(query, batch.layer(), None, CAUSAL, 0.2), cache, batch, query


def test_steps_over_pages_read_the_table_as_it_is(short: list[bool]) -> None:
    """Lengths, pages, layers and padding change between calls that keep their arguments."""
    attend, cache, batch, query = prepared()
    with torch.no_grad():
        for step in range(4):
            for layer in range(2):
                kv = batch.layer(layer)  # type: ignore[attr-defined]
                want = flex_attention(query, kv, block_mask=CAUSAL, scale=0.2, enable_gqa=True)
                assert torch.equal(attend(query, kv), want)
            if step == 2:
                cache.truncate(0, 5)
            cache.grow([0, 2], [1, 1])
            batch.update([2, 0], [1, 1])  # type: ignore[attr-defined]
        assert (attend(query, kv)[2] == 0).all()
    assert any(short)


def test_other_strides_and_numbers_of_threads_go_the_ordinary_way(short: list[bool]) -> None:
    attend, _, batch, query = prepared()
    kv = batch.layer()  # type: ignore[attr-defined]
    strided = torch.empty(3, 1, 4, 32).transpose(1, 2).copy_(query)
    before = torch.get_num_threads()
    with torch.no_grad():
        want = attend(query, kv)
        assert torch.equal(attend(query, kv), want) and short == [True]
        assert torch.equal(attend(strided, kv), want) and short == [True, False]
        torch.set_num_threads(before + 1)
        try:
            torch.testing.assert_close(attend(query, kv), want)
        finally:
            torch.set_num_threads(before)
        assert short == [True, False, False]


def test_integers_that_outgrow_their_lanes_go_the_ordinary_way(
    short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, _, batch, query = prepared()
    kv = batch.layer()  # type: ignore[attr-defined]
    with torch.no_grad():
        want = attend(query, kv)
        (kept,) = attend._launch.again.forwards.values()  # type: ignore[union-attr]
        kept._run = lambda arguments: 1
        for _ in range(2):
            assert torch.equal(attend(query, kv), want)
        assert short == [False, False] and kept._arguments is None
