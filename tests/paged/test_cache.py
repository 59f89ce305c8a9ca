"""PagedKVCache: what is written is read back, whatever sequences do in between."""

from __future__ import annotations

import io

import pytest
import torch

import attnloom
from attnloom import (
    DecodeMask,
    OutOfPagesError,
    PagedKV,
    PagedKVCache,
    PageTable,
    create_block_mask,
    flex_attention,
)
from attnloom.backends.reference.paged import gather_rows
from attnloom.errors import (
    AttnloomError,
    DtypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from tests.paged.draw import causal

H, D = 2, 8
TILED = {"backend": "tiled"}


def new_cache(num_pages: int = 30, num_layers: int = 1, **options) -> PagedKVCache:
    cache = PagedKVCache(num_pages, 16, H, D, num_layers=num_layers, **options)
    for stored in (*cache.keys, *cache.values):
        stored[:num_pages] = torch.nan
    return cache


def append(cache: PagedKVCache, sequences: list[int], counts: list[int]) -> torch.Tensor:
    """Append random tokens; their keys [B, H, n, D], which are their values negated."""
    key = torch.randn(len(sequences), H, max(counts), D)
    cache.append(sequences, key, -key, counts)
    return key


def read(cache: PagedKVCache, sequence: int) -> torch.Tensor:
    """[H, length, D]: the keys of a sequence, found to be its values negated."""
    table = cache.batch([sequence], 0).table
    key, value = (
        gather_rows(t, table, 0, cache.length(sequence))[0] for t in cache.layer_tensors(0)
    )
    torch.testing.assert_close(key, -value, rtol=0, atol=0, equal_nan=True)
    return key


def test_ragged_appends_are_read_back() -> None:
    cache, wanted = new_cache(), {}
    for _ in range(3):
        wanted[cache.new()] = torch.zeros(H, 0, D)
    for counts in ([20, 1, 0], [1, 1, 1], [5, 40, 16], [0, 0, 3]):
        key = append(cache, list(wanted), counts)
        for b, (sequence, count) in enumerate(zip(wanted, counts, strict=True)):
            wanted[sequence] = torch.cat([wanted[sequence], key[b, :, :count]], 1)
    for sequence, want in wanted.items():
        assert torch.equal(read(cache, sequence), want)


def test_forks_share_until_one_writes() -> None:
    cache = new_cache()
    a = cache.new()
    prompt = append(cache, [a], [20])[0]
    b, c = cache.fork(a), cache.fork(a, 18)
    free = cache.num_free_pages
    key = append(cache, [a, b, c], [1, 1, 1])
    assert free - cache.num_free_pages == 2  # of three owners one keeps the page
    for i, (sequence, kept) in enumerate(((a, 20), (b, 20), (c, 18))):
        want = torch.cat([prompt[:, :kept], key[i]], 1)
        assert torch.equal(read(cache, sequence), want)


def test_every_layer_is_copied_on_write() -> None:
    cache = new_cache(num_layers=2)
    a = cache.new()
    batch = cache.extend([a], [3])
    for layer in range(2):
        batch.write(torch.full((1, H, 3, D), layer + 1.0), torch.ones(1, H, 3, D), layer)
    b = cache.fork(a)
    batch = cache.extend([b], [1])
    for layer in range(2):
        batch.write(*torch.zeros(2, 1, H, 1, D), layer)
        page = cache.book.pages(b)[0]
        assert page != cache.book.pages(a)[0]
        assert (cache.keys[layer][page, :, :3] == layer + 1).all()


def test_truncated_tokens_are_replaced() -> None:
    cache = new_cache()
    a = cache.new()
    first = append(cache, [a], [40])[0]
    cache.truncate(a, 17)
    assert cache.num_free_pages == 28
    second = append(cache, [a], [3])[0]
    assert torch.equal(read(cache, a), torch.cat([first[:, :17], second], 1))


def test_defragment_moves_what_pages_hold() -> None:
    cache = new_cache()
    sequences = [cache.new() for _ in range(5)]
    append(cache, sequences, [40, 3, 50, 16, 33])
    wanted = {s: read(cache, s) for s in sequences[1::2]}
    cache.free(sequences[::2])
    assert cache.defragment() > 0
    used = [p for s in wanted for p in cache.book.pages(s)]
    assert sorted(used) == list(range(len(used)))
    for sequence, want in wanted.items():
        assert torch.equal(read(cache, sequence), want)


def test_state_is_saved_and_restored() -> None:
    cache = new_cache()
    a = cache.new()
    append(cache, [a], [40])
    b = cache.fork(a)
    append(cache, [b], [5])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    other = new_cache()
    append(other, [other.new()], [100])
    other.load_state_dict(torch.load(file))
    for sequence in (a, b):
        assert torch.equal(read(other, sequence), read(cache, sequence))
    assert other.num_free_pages == cache.num_free_pages and other.new() == cache.new()
    with pytest.raises(ShapeError, match=r"30 pages .* this cache 10"):
        new_cache(cache.num_pages - 20).load_state_dict(cache.state_dict())


def test_out_of_pages_writes_nothing() -> None:
    cache = new_cache(4)
    a, b = cache.new(), cache.new()
    append(cache, [a, b], [20, 16])
    before = read(cache, a)
    with pytest.raises(OutOfPagesError, match="2 pages are needed and 1 of 4 are free"):
        append(cache, [a, b], [13, 1])
    assert torch.equal(read(cache, a), before) and cache.length(b) == 16


def test_a_window_needs_its_pages_only() -> None:
    """Pages behind the window are freed as it moves; a mask that looks there gives NaN."""

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 30)

    cache, whole = new_cache(4), new_cache(30)
    mask = create_block_mask(window, None, None, 256, 256, BLOCK_SIZE=16)
    a, b = cache.new(), whole.new()
    for _ in range(120):
        key, value, query = torch.randn(3, 1, H, 1, D)
        batch, full = cache.append([a], key, value), whole.append([b], key, value)
        out = flex_attention(query, batch.layer(), block_mask=mask, kernel_options=TILED)
        want = flex_attention(query, full.layer(), block_mask=mask, kernel_options=TILED)
        assert torch.equal(out, want)
        cache.drop_before(a, max(0, cache.length(a) - 30))
    assert cache.num_free_pages >= 1
    for backend in ("tiled", "cpu"):
        out = flex_attention(query, cache.layer(), kernel_options={"backend": backend})
        assert out.isnan().all()


def test_a_batch_is_updated_in_place() -> None:
    cache = new_cache()
    a, b = cache.new(), cache.new()
    append(cache, [a, b], [20, 3])
    batch = cache.empty_batch(3, max_length=64)
    pointers = [t.data_ptr() for t in (batch.table.lengths, batch.table.pages)]
    query = torch.randn(3, H, 1, D)
    for sequences in ([a, b], [b], [b, a]):
        batch.update(sequences, [1] * len(sequences))
        out = flex_attention(query, batch.layer(), kernel_options=TILED)
        for i, sequence in enumerate(sequences):
            alone = flex_attention(
                query[i : i + 1], cache.batch([sequence]).layer(), kernel_options=TILED
            )
            torch.testing.assert_close(out[i : i + 1], alone)
        assert (out[len(sequences) :] == 0).all()
    assert pointers == [t.data_ptr() for t in (batch.table.lengths, batch.table.pages)]
    with pytest.raises(ShapeError, match="this batch takes 1 query and 64 tokens"):
        batch.update([a], [2])


def test_the_whole_cache_is_a_key() -> None:
    cache = new_cache()
    a, b = cache.new(), cache.new()
    append(cache, [a, b], [20, 3])
    query = torch.randn(2, H, 2, D)
    mask = create_block_mask(causal, None, None, 64, 64)
    out = flex_attention(query, cache, block_mask=mask, kernel_options=TILED)
    want = flex_attention(query, cache.layer(0, 2), block_mask=mask, kernel_options=TILED)
    assert torch.equal(out, want)


def test_a_decode_mask_advances_in_place() -> None:
    mask = create_block_mask(causal, None, None, 64, 64)
    lengths = torch.tensor([10, 3], dtype=torch.int32)
    decode = mask.for_decode(lengths)
    assert isinstance(decode, DecodeMask) and decode.lengths is lengths
    key, query = torch.randn(2, H, 64, D), torch.randn(2, H, 1, D)
    for _ in range(2):
        out = flex_attention(query, key, key, block_mask=decode, kernel_options=TILED)
        for b, n in enumerate(lengths.tolist()):
            kept = key[b : b + 1, :, :n]
            alone = flex_attention(query[b : b + 1], kept, kept, kernel_options=TILED)
            torch.testing.assert_close(out[b : b + 1], alone)
        decode.advance()
    decode.update(torch.tensor([5, 6]))
    assert lengths.tolist() == [5, 6]


def _paged(q_len: int = 1, batch: int = 1):
    cache = new_cache()
    sequences = [cache.new() for _ in range(batch)]
    append(cache, sequences, [20] * batch)
    return torch.randn(batch, H, q_len, D), cache.batch(sequences, q_len).layer()


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


MISTAKES = {
    "value too": (
        lambda: flex_attention(_paged()[0], _paged()[1], torch.zeros(1)),
        OptionError, "value is a Tensor, but key is a PagedKV",
    ),
    "other batch": (
        lambda: flex_attention(torch.zeros(2, H, 1, D), _paged()[1]),
        ShapeError, "query has batch 2, the cache 1 sequence;",
    ),
    "short mask": (
        lambda: flex_attention(
            *_paged(), None, None, create_block_mask(causal, None, None, 16, 16),
        ),
        ShapeError, "sequences are up to 20 tokens long. It is the mask of whole sequences",
    ),
    "decode mask": (
        lambda: flex_attention(
            *_paged(), None, None,
            create_block_mask(causal, None, None, 64, 64).for_decode(_int32(20)),
        ),
        OptionError, "block_mask is a DecodeMask, but the cache knows the lengths",
    ),
    "gradient": (
        lambda: flex_attention(_paged()[0].requires_grad_(), _paged()[1]),
        UnsupportedError, "attention over a cache has no backward",
    ),
    "layer of several": (
        lambda: flex_attention(_paged()[0], new_cache(num_layers=3)),
        OptionError, "this cache has 3 layers; pass batch.layer(i)",
    ),
    "page size": (
        lambda: PagedKVCache(4, 24, H, D),
        OptionError, "page_size is 24; it must be a power of two from 16",
    ),
    "no pages": (
        lambda: PagedKVCache(0, 16, H, D), OptionError, "num_pages is 0; it must be an int of 1",
    ),
    "append to layers": (
        lambda: append(new_cache(num_layers=2), [0], [1]), OptionError, "append writes one layer",
    ),
    "key of another size": (
        lambda: (c := new_cache()).append([c.new()], *torch.zeros(2, 1, H, 1, D + 1)),
        ShapeError, "for 1 sequence of this cache it must be",
    ),
    "counts": (
        lambda: (c := new_cache()).extend([c.new()], [1, 2]),
        ShapeError, "1 sequence, but 2 counts",
    ),
    "lengths of another dtype": (
        lambda: PageTable(torch.zeros(1), None, None, 0, 5), DtypeError, "a PageTable holds int32",
    ),
    "too long for the pages": (
        lambda: PageTable(_int32(1), None, _int32(1)[None], 16, 17),
        ShapeError, "16 tokens fit into 1 page of 16.",
    ),
    "pages of another size": (
        lambda: PagedKV(
            *torch.zeros(2, 3, H, 32, D), PageTable(_int32(1), None, _int32(1)[None], 16, 9),
        ),
        ShapeError, "pages of 16 tokens are",
    ),
    "float lengths": (
        lambda: create_block_mask(causal, None, None, 16, 16).for_decode(torch.ones(2)),
        DtypeError, "lengths is torch.float32; it must hold integers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, error, text = MISTAKES[name]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
    assert isinstance(caught.value, AttnloomError)


def test_torch_compile_runs_beside_the_graph() -> None:
    query, kv = _paged()
    want = flex_attention(query, kv, kernel_options=TILED)
    compiled = torch.compile(
        lambda q: flex_attention(q, kv, kernel_options=TILED) * 2, backend="eager"
    )
    assert torch.equal(compiled(query), want * 2)


def test_names_are_exported() -> None:
    names = {"PagedKVCache", "PagedBatch", "PagedKV", "PageTable", "DecodeMask", "OutOfPagesError"}
    assert names <= set(attnloom.__all__)
