"""What a new user did wrong with caches: refused before anything changes."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attnloom import PagedKVCache, create_block_mask, flex_attention
from attnloom.errors import AttnloomError
from attnloom.mods import sliding_window

H, D = 2, 8


def new_tokens(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(1, H, n, D).to(dtype)


def cache_of_five() -> PagedKVCache:
    """One sequence of 5 tokens, in pages of 16."""
    cache = PagedKVCache(8, 16, H, D)
    cache.append([cache.new()], new_tokens(5), new_tokens(5))
    return cache


def tampered(**change: object) -> dict:
    state = cache_of_five().state_dict()
    state["book"] |= change
    return state


K = new_tokens(40)
REFUSED: dict[str, Callable[[PagedKVCache], object]] = {
    "counts beyond n": lambda c: c.append([0], K, K, counts=[41]),
    "negative count": lambda c: c.append([0], K, K, counts=[-1]),
    "grad": lambda c: c.append([0], K.clone().requires_grad_(), K),
    "grad of value": lambda c: c.append([0], K, K.clone().requires_grad_()),
    "numpy": lambda c: c.append([0], K, K.numpy()),  # type: ignore[arg-type]
    "meta": lambda c: c.append([0], K, K.to("meta")),
    "complex": lambda c: c.append([0], K.to(torch.complex64), K),
    "int keys": lambda c: c.append([0], K.int(), K),
    "three dimensions": lambda c: c.append([0], K[0], K),
    "q_len too small": lambda c: c.extend([0], 40, q_len=2),
    "q_len of floats": lambda c: c.extend([0], 40, q_len=40.5),  # type: ignore[arg-type]
    "float counts": lambda c: c.extend([0], torch.tensor([4.0])),  # type: ignore[arg-type]
    "reserve of floats": lambda c: c.reserve(0, 40.5),  # type: ignore[arg-type]
    "a state that would name a sequence twice": lambda c: c.load_state_dict(tampered(next=0)),
    "a state of a negative length": lambda c: c.load_state_dict(tampered(sequences={0: [-1, [7]]})),
    "more than all pages": lambda c: c.extend([0], 2**40),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_took_pages_and_added_tokens(name: str) -> None:
    cache = cache_of_five()
    before = cache.keys[0][:8].clone()
    with pytest.raises(AttnloomError):
        REFUSED[name](cache)
    assert (cache.length(0), cache.num_free_pages) == (5, 7)
    assert torch.equal(cache.keys[0][:8].nan_to_num(), before.nan_to_num())


def test_a_batch_too_large_for_memory_took_pages() -> None:
    cache = cache_of_five()
    with pytest.raises(RuntimeError):
        cache.extend([0], 40, q_len=2**50)
    assert (cache.length(0), cache.num_free_pages) == (5, 7)


def test_a_refused_value_let_the_key_be_written() -> None:
    cache = cache_of_five()
    batch = cache.batch([0], 5)
    with pytest.raises(AttnloomError):
        batch.write(new_tokens(5) * 7, new_tokens(4))
    assert (cache.keys[0][0, :, :5] == 1).all()


def test_an_inference_cache_took_pages_outside() -> None:
    with torch.inference_mode():
        cache = cache_of_five()
    with pytest.raises(AttnloomError, match="can only be written there"):
        cache.append([0], K, K)
    assert (cache.length(0), cache.num_free_pages) == (5, 7)
    with torch.inference_mode():
        cache.append([0], K, K)
    assert cache.length(0) == 45


FOUR: dict[str, object] = {
    "tensor": torch.tensor([4]),
    "scalar tensor": torch.tensor(4),
    "array": np.array([4]),
    "numpy's int": np.int64(4),
    "list of tensors": [torch.tensor(4)],
    "list of numpy's": [np.int64(4)],
}


@pytest.mark.parametrize("name", FOUR)
def test_counts_as_tensors_and_arrays_poisoned_the_cache(name: str) -> None:
    cache = cache_of_five()
    four = FOUR[name]
    cache.extend([0], four)  # type: ignore[arg-type]
    saved = cache.length(0)
    cache.append([0], new_tokens(4), new_tokens(4), counts=four)  # type: ignore[arg-type]
    cache.batch([0], four).update([0], four)  # type: ignore[arg-type]
    cache.grow([0], four)  # type: ignore[arg-type]
    assert (saved, cache.length(0)) == (9, 17)
    json.dumps(cache.book.state())  # ints of Python alone


@pytest.mark.parametrize("four", [torch.tensor(4), np.int64(4)])
def test_lengths_as_tensors_poisoned_the_cache(four: int) -> None:
    cache = cache_of_five()
    cache.fork(0, four)
    cache.truncate(0, four)
    cache.reserve(0, four * 5)
    cache.drop_before(0, four)
    cache.extend([0, 1], 1, q_len=four)
    assert type(cache.length(0)) is type(cache.length(1)) is int
    json.dumps(cache.book.state())


def free(cache: PagedKVCache) -> None:
    cache.free(0)


def copy_on_write(cache: PagedKVCache) -> None:
    cache.fork(0, 36)
    cache.extend([0], 1)


def load(cache: PagedKVCache) -> None:
    cache.load_state_dict(cache.state_dict())


STALE: dict[str, Callable[[PagedKVCache], object]] = {
    "free": free,
    "truncate": lambda c: c.truncate(0, 2),
    "drop_before": lambda c: c.drop_before(0, 33),
    "defragment": lambda c: (c.free(1), c.defragment()),
    "copy on write": copy_on_write,
    "load": load,
}


def two_sequences() -> PagedKVCache:
    """1 lies before 0, of 40 tokens each."""
    cache = PagedKVCache(8, 16, H, D)
    first, second = cache.new(), cache.new()
    for sequence in (second, first):
        cache.append([sequence], K, K)
    return cache


@pytest.mark.parametrize("name", STALE)
def test_a_stale_batch_read_and_wrote_pages_of_another_sequence(name: str) -> None:
    cache = two_sequences()
    batch = cache.empty_batch(1, 64)
    batch.update([0], [1])
    kept, query = batch.layer(), new_tokens(1)  # kept: it was not watched, and read on
    flex_attention(query, kept)
    STALE[name](cache)
    for use in (
        batch.layer,
        lambda: batch.write(new_tokens(1), new_tokens(1)),
        lambda: flex_attention(query, kept),
    ):
        with pytest.raises(AttnloomError, match="old pages of sequence 0"):
            use()
    live = 0 if 0 in cache.sequences else 1
    batch.update([live], [1])
    batch.write(new_tokens(1), new_tokens(1))
    again = flex_attention(query, kept)  # nan where a page was dropped
    torch.testing.assert_close(again, flex_attention(query, batch.layer()), equal_nan=True)


def test_a_copy_of_a_layer_is_its_own() -> None:
    """It has the pages as they were, which no other sequence takes."""
    cache = two_sequences()
    kept, query = cache.batch([0], 1).layer(), new_tokens(1)
    want = flex_attention(query, kept)
    copied, other = copy.deepcopy(kept), copy.deepcopy(cache.batch([0], 1))
    cache.free([0, 1])
    cache.keys[0].fill_(9.0)
    assert torch.equal(flex_attention(query, copied), want)
    assert torch.equal(flex_attention(query, other.layer()), want)
    other.cache.free(0)
    with pytest.raises(AttnloomError, match="old pages of sequence 0"):
        other.layer()


def test_a_layer_does_not_keep_its_batch_alive() -> None:
    """A cycle of the two would keep the memory of a cache until garbage is looked for."""
    cache = two_sequences()
    batch = cache.batch([0], 1)
    batch.layer()
    last = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert last() is None
    finally:
        gc.enable()


def test_a_batch_outlives_what_other_sequences_do() -> None:
    cache = two_sequences()
    batch = cache.batch([0], 1)
    cache.extend([0], 30)
    cache.free(1)
    cache.reserve(0, 100)
    cache.extend([cache.new()], 9)
    batch.write(new_tokens(1), new_tokens(1))
    assert batch.layer() is batch.layer()
    assert cache.batch([], []).layer() is not None


@pytest.mark.parametrize("state", [None, {}, {"book": 1}])
def test_no_state_at_all_gave_a_key_error(state: dict[str, object]) -> None:
    cache = cache_of_five()
    with pytest.raises(AttnloomError, match="not what state_dict of a cache gives"):
        cache.load_state_dict(state)
    assert cache.length(0) == 5


def test_a_state_of_another_dtype_was_converted() -> None:
    cache = PagedKVCache(8, 16, H, D, dtype=torch.float16)
    with pytest.raises(AttnloomError, match=r"holds torch\.float32, this cache torch\.float16"):
        cache.load_state_dict(cache_of_five().state_dict())
    assert not cache.sequences


def spoil(state: dict[str, object], path: tuple[object, ...], value: object) -> None:
    into = state
    for name in path[:-1]:
        into = into[name]  # type: ignore[assignment,index]
    into[path[-1]] = value  # type: ignore[index]


SPOILED: dict[str, tuple[tuple[object, ...], object]] = {
    "no book": (("book",), None),
    "no sizes": (("book", "page_size"), "16"),
    "no such page": (("book", "sequences"), {0: [5, [99]]}),
    "no page": (("book", "sequences"), {0: [5, []]}),
    "another's page": (("book", "sequences"), {0: [5, [1]]}),
    "owners of nobody": (("book", "owners"), [2, 0, 0, 0, 0, 0, 0, 0]),
    "used pages of another": (("used",), [3]),
    "no keys": (("keys",), None),
    "no layer": (("keys",), []),
    "lists of keys": (("keys",), [[1.0]]),
    "fewer pages of keys": (("keys",), [torch.zeros(0, H, 16, D)]),
    "fewer layers of values": (("values",), [torch.zeros(1, H, 16, D)] * 2),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_state_raised_whatever_came_up_or_was_loaded(name: str) -> None:
    cache = cache_of_five()
    state = copy.deepcopy(cache_of_five().state_dict())
    state["keys"][0].fill_(7.0)
    spoil(state, *SPOILED[name])
    with pytest.raises(AttnloomError):
        cache.load_state_dict(state)
    assert (cache.length(0), cache.num_free_pages) == (5, 7)
    assert (cache.keys[0][0, :, :5] == 1).all()


MOVES: dict[str, Callable[[PagedKVCache], tuple[int, int, int]]] = {
    "beyond the end": lambda c: (0, 36, 3),
    "from before the beginning": lambda c: (0, 35, -1),
    "from a dropped page, which the scrap page stood for": lambda c: (0, 35, 3),
    "to a page that a fork shares": lambda c: (c.fork(0), 35, 34),
}


@pytest.mark.parametrize("name", MOVES)
def test_tokens_moved_to_pages_of_others(name: str) -> None:
    cache = PagedKVCache(8, 16, H, D)
    cache.append([cache.new()], new_tokens(36), new_tokens(36))
    cache.drop_before(0, 20)
    move = MOVES[name](cache)
    stored = cache.keys[0].clone()
    with pytest.raises(AttnloomError):
        cache.move_tokens([(0, 35, 34), move])
    assert torch.equal(cache.keys[0].nan_to_num(), stored.nan_to_num())


def test_a_mask_of_some_rows_was_moved_twice() -> None:
    keys, lengths = torch.randn(1, H, 64, D), torch.tensor([40], dtype=torch.int32)
    mask = create_block_mask(sliding_window(4), None, None, 64, 64, BLOCK_SIZE=16)
    query = torch.randn(1, H, 1, D)
    for part in (mask.rows(16, 64), mask[:, :, 1:]):
        with pytest.raises(AttnloomError, match="begins at query"):
            flex_attention(query, keys, keys, block_mask=part.for_decode(lengths))
    first = mask.rows(0, 50)  # begins where the whole does
    torch.testing.assert_close(
        flex_attention(query, keys, keys, block_mask=first.for_decode(lengths)),
        flex_attention(query, keys, keys, block_mask=mask.for_decode(lengths)),
    )


def test_counts_of_a_decode_mask_could_not_be_updated() -> None:
    keys = torch.randn(2, H, 64, D)
    query = torch.randn(2, H, 3, D)
    mask = create_block_mask(sliding_window(4), None, None, 64, 64)
    lengths, counts = torch.tensor([40, 3]), torch.tensor([1, 3])
    decode = mask.for_decode(torch.tensor([8, 9]), torch.tensor([3, 0]))
    decode.update(lengths, counts)
    torch.testing.assert_close(
        flex_attention(query, keys, keys, block_mask=decode),
        flex_attention(query, keys, keys, block_mask=mask.for_decode(lengths, counts)),
    )
    with pytest.raises(AttnloomError, match="one count each"):
        decode.update(torch.tensor([7, 7]), torch.tensor([1]))
    assert decode.lengths.tolist() == lengths.tolist()
    with pytest.raises(AttnloomError, match="made without counts"):
        mask.for_decode(lengths).update(lengths, counts)


def test_printing_one_layer_printed_every_number_of_its_pages() -> None:
    cache = cache_of_five()
    assert repr(cache) == (
        "PagedKVCache(8 pages of 16 tokens, 7 free, 1 sequence, 1 layer of 2 x 8, torch.float32, "
        "cpu)"
    )
    assert len(repr(cache.layer())) < 400 and "sequences [0]" in repr(cache.batch())
    assert (cache.num_pages, cache.head_dim, cache.value_dim) == (8, D, D)
